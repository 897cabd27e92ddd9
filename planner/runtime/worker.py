"""One process of a run: makes its stages and links, trains, and tells how it went."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from planner.allocator import keep_freed_memory
from planner.capture import Batch, Capture, ModelFile, capture_as, load_model_file
from planner.capture.shard import shard
from planner.capture.sharding import Sharding
from planner.errors import InputError
from planner.runtime.board import Board, State
from planner.runtime.checkpoint import Checkpoints, Content, Part, check, content_of, load
from planner.runtime.failure import Failure, Where, place, raised
from planner.runtime.figures import RankFigures
from planner.runtime.groups import Communicators, Group, LostContactError
from planner.runtime.initial import initial_weights
from planner.runtime.job import RunJob
from planner.runtime.messages import check_routes, rank_programs
from planner.runtime.parts import TensorParts
from planner.runtime.reference import Reference, compare, train_whole
from planner.runtime.saved import Saved, SavedBatch, SavedModel, read_saved, remove_unfinished
from planner.runtime.trainer import Shape, Trainer, routes_of
from planner.runtime.transport import Transport
from planner.runtime.weights import whole_weights
from planner.schedules import Action, Letter, out_of_order
from planner.simulate.costs import durations

STORE_PREFIX = "pipeplan"
FAILURE_KEY = "failure"
GRACE_S = 10.0
"""How long a rank that lost contact waits for the failed rank's own words."""


def main(job: RunJob) -> None:
    """The whole life of one process; started by the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal: the launcher decides
    global_rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    os.dup2(2, 1)  # stdout is the launcher's: what the user's code prints goes to stderr
    _end_with_parent(job.folder, local_size)
    torch.set_num_threads(1)
    keep_freed_memory()
    board = Board(job.folder / "board", num_processes=local_size, num_steps=job.steps)
    writer = board.writer(local_rank)
    with (job.folder / f"stack{local_rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        writer.start(os.getpid())  # from here on the launcher may ask where this process is
        store: Store = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(minutes=5)
        )
        store = PrefixStore(STORE_PREFIX, store)
        where = Where.of(job, global_rank)
        try:
            _Worker(job, global_rank, local_rank, store, board).run()
        except LostContactError as error:
            time.sleep(GRACE_S)  # the launcher ends this process as soon as the failed one's words are known
            _tell(store, Failure(message=f"{place(where, board.read(local_rank))}: {error}"))
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raises ends the run with its words
            _tell(store, raised(error, place(where, board.read(local_rank))))
        else:
            return
        sys.stderr.flush()
        os._exit(1)


def _tell(store: Store, failure: Failure) -> None:
    """Leave the failure for every launcher; the first one stands."""
    store.compare_set(FAILURE_KEY, "", failure.to_json())


def _end_with_parent(folder: Path, num_local: int) -> None:
    """A launcher that is killed takes its processes along, those too that are stopped, and the run's folder."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        with suppress(OSError):  # no board: the launcher has tidied up itself
            board = Board(folder / "board", num_processes=num_local, num_steps=0)
            others = {board.read(process).pid for process in range(num_local)} - {0, os.getpid()}
            shutil.rmtree(folder, ignore_errors=True)
            for pid in others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class _Worker:
    """One process of a run."""

    def __init__(self, job: RunJob, global_rank: int, local_rank: int, store: Store, board: Board) -> None:
        self.job = job
        self.global_rank = global_rank
        self.rank, self.replica = job.place_of(global_rank)
        self.tensor_rank = global_rank % job.plan.parallel.tensor
        self.store = store
        self.verified: dict[str, Any] | None = None
        self.writer = board.writer(local_rank)
        self.quiet = board.quiet(local_rank)
        self.device = torch.device("cuda", local_rank) if job.device == "cuda" else torch.device("cpu")
        if job.device == "cuda":
            torch.cuda.set_device(self.device)

    def run(self) -> None:
        """Everything."""
        job = self.job
        self._check_same_everywhere()
        self.saved = read_saved(job.resume) if job.resume else None
        model_file = load_model_file(job.model_path)
        captured = capture_as(
            model_file,
            fingerprint=job.plan.model.fingerprint,
            microbatch_size=job.plan.batch.microbatch,
            device=str(self.device),
            seed=job.seed,
            weightless=job.in_parts,
        )
        if captured.fingerprint != job.plan.model.fingerprint:
            raise InputError(
                f"{job.model_path}: the model is not the one that the plan was made for "
                f"(fingerprint {captured.fingerprint[:12]}, the plan's {job.plan.model.fingerprint[:12]})",
                hint="profile and solve again, or restore the model file",
            )
        if self.saved is not None:
            self._check_checkpoint(model_file, self.saved)
        self.writer.at(State.STARTING)
        reference = self._train_whole(model_file, captured)
        trainer = self._trainer(model_file, self._part(captured))
        self._resume(trainer)
        self._barrier()
        figures = self._train(trainer, model_file, reference)
        self.writer.at(State.ENDING)
        self._report(trainer, figures)

    def _check_same_everywhere(self) -> None:
        if self.global_rank == 0:
            self.store.set("run", uuid.uuid4().hex[:12])
            self.store.set("digest", self.job.digest)
        elif self.store.get("digest").decode() != self.job.digest:
            raise InputError(
                f"rank {self.global_rank} was started with another plan or other options than rank 0",
                hint="start the same command with the same plan on every machine",
            )

    def _check_checkpoint(self, model_file: ModelFile, saved: Saved) -> None:
        """That it is of this model, whatever layers the plan sees in it, and this process's share of its files."""
        job = self.job
        assert job.resume is not None
        fingerprint = saved.model.fingerprint
        if fingerprint != job.plan.model.fingerprint:
            size, device = job.plan.batch.microbatch, str(self.device)
            same = capture_as(
                model_file,
                fingerprint=fingerprint,
                microbatch_size=size,
                device=device,
                seed=job.seed,
                weightless=job.in_parts,
            )
            if same.fingerprint != fingerprint:
                raise InputError(
                    f"{job.resume}: is a checkpoint of another model ({saved.model.name}, {fingerprint[:12]})",
                    hint="name its own folder with --checkpoint, or restore the model file",
                )
        check(job.resume, saved, process=self.global_rank, num_processes=job.num_processes, board=self.writer)

    def _resume(self, trainer: Trainer) -> None:
        """Go on from the checkpoint, once every process has found its share of it whole."""
        if self.saved is not None and self.job.resume is not None:
            self._barrier()
            load(self.job.resume, self.saved, trainer, replica=self.replica, board=self.writer, parts=self.parts)

    def _checkpoints(self) -> Checkpoints | None:
        job, plan = self.job, self.job.plan
        if job.checkpoints is None:
            return None
        if self.global_rank == 0 and job.checkpoints.is_dir():
            remove_unfinished(job.checkpoints)
        return Checkpoints(
            folder=job.checkpoints,
            run=self.store.get("run").decode(),
            process=self.global_rank,
            num_processes=job.num_processes,
            control=self.control,
            board=self.writer,
            seed=job.seed,
            model=SavedModel(name=plan.model.name, fingerprint=plan.model.fingerprint),
            batch=SavedBatch(
                global_batch=plan.batch.global_batch, microbatch=plan.batch.microbatch, data=plan.parallel.data
            ),
        )

    def _part(self, captured: Capture) -> Capture:
        """What this process has of every layer."""
        size = self.job.plan.parallel.tensor
        if size == 1:
            return captured
        sequence = bool(self.job.plan.parallel.sequence)
        return shard(captured, tensor=size, rank=self.tensor_rank, sequence=sequence)

    def _trainer(self, model_file: ModelFile, captured: Capture) -> Trainer:
        job, plan = self.job, self.job.plan
        programs = self.programs = captured.stages([stage.layers for stage in plan.stages])
        found = routes_of(captured, programs, job.ranks)
        if not job.in_parts:  # all the model's, on this device: the run makes its own
            for parameter in captured.module.parameters():
                parameter.data = parameter.data.new_empty(0)
        check_routes(job.schedule, found, num_microbatches=plan.batch.microbatches)
        rank_program = rank_programs(job.schedule, found, seconds=self._foretold)
        pairs = sorted({(sender, program.rank) for program in rank_program for sender in program.inbox})
        communicators = Communicators(self.store, device=self.device, one_node=job.one_node)
        self.control = Group(communicators.make("control", self.global_rank, job.num_processes, on_cpu=True))
        self.writer.at(State.STARTING)
        mine = rank_program[self.rank]
        transport = Transport(
            communicators,
            prefix=f"replica{self.replica}.{self.tensor_rank}",
            rank=self.rank,
            pairs=pairs,
            inbox=mine.inbox,
            windows=mine.windows,
            device=self.device,
        )
        group = None
        if plan.parallel.data > 1:
            name = f"replicas{self.rank}.{self.tensor_rank}"
            group = Group(communicators.make(name, self.replica, plan.parallel.data))
        pipeline = None
        if plan.parallel.pipeline > 1 and (model_file.clip_norm is not None or model_file.autocast is torch.float16):
            pipeline = Group(
                communicators.make(f"pipeline{self.replica}.{self.tensor_rank}", self.rank, plan.parallel.pipeline)
            )
        self.transport = transport
        wanted = self._own_parameters(captured) if job.in_parts else None
        module = initial_weights(model_file, job.seed, files=job.initial, wanted=wanted)
        self._keep_unused(module)
        self.parts = self._tensor_parts(captured.sharding, module, communicators)
        return Trainer(
            model_file=model_file,
            module=module,
            programs=programs,
            recompute=[stage.recompute for stage in plan.stages],
            found=found,
            program=mine,
            shape=Shape(
                microbatch_size=plan.batch.microbatch,
                num_microbatches=plan.batch.microbatches,
                data=plan.parallel.data,
                replicas=(self.replica,),
            ),
            seed=job.seed,
            device=self.device,
            transport=transport,
            group=group,
            pipeline=pipeline,
            board=self.writer,
            parts=self.parts,
            zero1=bool(plan.parallel.zero1),
        )

    def _tensor_parts(
        self, sharding: Sharding | None, module: nn.Module, communicators: Communicators
    ) -> TensorParts | None:
        """What this process holds of each layer that it shares with others, put in the place of the whole."""
        if sharding is None:
            return None
        name = f"tensor{self.rank}.{self.replica}"
        group = Group(communicators.make(name, self.tensor_rank, sharding.size), whom="other tensor ranks")
        sharding.connect(group)
        sharding.take_parts(module)
        return TensorParts(splits=sharding.parameters, size=sharding.size, rank=sharding.rank, group=group)

    def _own_parameters(self, captured: Capture) -> set[str]:
        """Those that this process trains, or tells of."""
        own = [program for program in self.programs if self.job.ranks[program.index] == self.rank]
        used = {name for program in self.programs for name in program.parameters}
        unused = {name for name, _ in captured.module.named_parameters()} - used
        return {name for program in own for name in program.parameters} | (set() if self.global_rank else unused)

    def _keep_unused(self, module: nn.Module) -> None:
        """Process 0 keeps the parameters and buffers that no stage uses, as they belong to the model's weights."""
        used = {name for program in self.programs for name in (*program.parameters, *program.buffers)}
        parameters = {name: value for name, value in module.named_parameters() if name not in used}
        buffers = {name: value for name, value in module.named_buffers() if name not in used}
        self.unused_parameters = tuple(parameters)
        self.unused = {name: value.detach() for name, value in (parameters | buffers).items() if not self.global_rank}

    def _foretold(self, action: Action) -> float:
        """An action's planned seconds."""
        cost = durations(self.job.plan.stages[action.stage])
        match action.letter:
            case Letter.FORWARD:
                return cost.forward_s
            case Letter.BACKWARD:
                return cost.backward_s
            case Letter.BACKWARD_INPUT:
                return cost.backward_input_s
            case _:
                return cost.backward_weight_s

    def _barrier(self) -> None:
        self.control.barrier()

    def _batches(self, model_file: ModelFile) -> Iterator[Batch]:
        """The data of the steps that this run does."""
        job = self.job
        return model_file.data(
            job.plan.batch.global_batch, seed=job.seed, first=job.start, skipped=lambda: self.writer.at(State.DATA)
        )

    # --- training -----------------------------------------------------------------------------------------------------

    def _train(self, trainer: Trainer, model_file: ModelFile, reference: Reference | None) -> RankFigures:
        """All steps; after the first ``verify_steps`` the comparison with one process."""
        job = self.job
        batches = self._batches(model_file)
        figures = RankFigures(trainer)
        checkpoints = self._checkpoints()
        self.transport.begin(job.steps - job.start)
        ended = time.perf_counter()
        for step in range(job.start, job.steps):
            self.writer.step(step)
            record = trainer.step(step, next(batches))
            figures.add(record)
            now = time.perf_counter()
            self.writer.done(step, loss=record.loss, seconds=now - ended)
            ended = now
            verified = step + 1 == job.start + job.verify_steps
            saved = checkpoints is not None and self._is_due(step + 1)
            if verified:
                self.writer.at(State.VERIFYING)
                self._compare(trainer, figures, reference)
            if checkpoints is not None and saved:
                checkpoints.save(step + 1, self._content(trainer))
            if verified or saved:
                self._barrier()
                figures.begin()
                ended = time.perf_counter()
        return figures

    def _is_due(self, step: int) -> bool:
        """Whether there is a checkpoint before step ``step``."""
        every = self.job.checkpoint_every
        return step == self.job.steps or (every is not None and step % every == 0)

    def _content(self, trainer: Trainer) -> Content:
        """What this process writes; the first one also what no stage uses."""
        ranks = self._writing_ranks()
        mine = {name for name, rank in ranks.items() if rank == self.rank}
        replicas = self.job.plan.parallel.data
        state = None
        if trainer.shards is not None and trainer.optimizer is not None:
            tensor = self.job.plan.parallel.tensor
            first = self.global_rank - self.replica * tensor
            processes = [first + replica * tensor for replica in range(replicas)]
            state = trainer.shards.whole_state(
                trainer.optimizer, sorted(mine), control=self.control, processes=processes
            )
        content = content_of(trainer, rank_writes=mine, replica=self.replica, replicas=replicas, state=state)
        if self.parts is not None:
            held = trainer.parameters
            content.tensors = self.parts.wholes(content.tensors, held, self.control, self.global_rank)
            if self.tensor_rank:
                content.optimizer = {}
        if self.global_rank == 0:
            content.tensors |= self.unused
        return content

    def _writing_ranks(self) -> dict[str, int]:
        """The pipeline rank that writes each parameter and buffer: the first that changes it, else that uses it."""
        ranks: dict[str, int] = {}
        for program in sorted(self.programs, key=lambda program: self.job.ranks[program.index]):
            for name in (*program.parameters, *program.buffers):
                ranks.setdefault(name, self.job.ranks[program.index])
        for program in self.programs:
            ranks |= dict.fromkeys(program.changed_buffers, self.job.ranks[program.index])
        return ranks

    def _compare(self, trainer: Trainer, figures: RankFigures, reference: Reference | None) -> None:
        """Set the weights and losses so far beside those of one process, on rank 0."""
        losses = torch.tensor(figures.losses, dtype=torch.float64)
        source = self._loss_rank()
        if source and self.global_rank == source:
            self.control.send(losses, 0)
        if source and self.global_rank == 0:
            self.control.receive(losses, source)
        weights = self._whole_weights(trainer)
        if reference is None:
            for _ in weights:
                pass
        else:
            sizes = self.job.plan.parallel
            exact = sizes.data <= 2 and sizes.tensor == 1 and not out_of_order(self.job.schedule)
            self.verified = compare(reference, weights, losses.tolist(), exact=exact)

    def _loss_rank(self) -> int:
        """The process that makes the loss, of the first replica."""
        last = next(program for program in self.programs if program.has_loss)
        sizes = self.job.plan.parallel
        return self.job.ranks[last.index] * sizes.data * sizes.tensor

    def _whole_weights(self, trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
        """All parameters at process 0."""
        own, sizes = trainer.parameters | self.unused, self.job.plan.parallel
        splits = self.parts.splits if self.parts is not None else {}
        return whole_weights(own, self.control, self.global_rank, self._owners(), splits=splits, tensor=sizes.tensor)

    def _owners(self) -> dict[str, int]:
        """The process that tells each parameter: the first one that has it."""
        sizes = self.job.plan.parallel
        owners = dict.fromkeys(self.unused_parameters, 0)
        for program in self.programs:
            owner = self.job.ranks[program.index] * sizes.data * sizes.tensor
            for name in program.parameters:
                owners[name] = min(owner, owners.get(name, owner))
        return owners

    def _report(self, trainer: Trainer, figures: RankFigures) -> None:
        """Leave this process's part of the result in the store."""
        digest = hashlib.sha256()
        for _, weight in self._whole_weights(trainer):
            digest.update(weight.reshape(-1).view(torch.uint8).numpy().data)
        told = figures.told(rows=self.job.record) | {
            "clock_s": figures.clock_s if self.job.one_node else None,
            "rank": self.rank,
            "has_loss": self.global_rank == self._loss_rank(),
            "peak_memory_bytes": trainer.peak_memory_bytes(),
            "trainable_bytes": trainer.trainable_bytes,
            "weights_sha256": digest.hexdigest() if self.global_rank == 0 else None,
            "verify": self.verified,
        }
        self.store.set(f"result/{self.global_rank}", json.dumps(told))
        self.transport.close()
        self._barrier()

    def _train_whole(self, model_file: ModelFile, captured: Capture) -> Reference | None:
        """The first steps in this one process, if it is the one to compare."""
        job = self.job
        if not job.verify_steps or self.global_rank:
            return None
        self.writer.at(State.VERIFYING)
        plan = job.plan
        return train_whole(
            model_file,
            captured,
            start=job.start,
            restore=self._restore_whole,
            batches=lambda: self._batches(model_file),
            num_steps=job.verify_steps,
            shape=Shape(
                microbatch_size=plan.batch.microbatch,
                num_microbatches=plan.batch.microbatches,
                data=plan.parallel.data,
                replicas=tuple(range(plan.parallel.data)),
            ),
            seed=job.seed,
            initial=job.initial,
            device=self.device,
            board=self.quiet,
        )

    def _restore_whole(self, part: Part) -> None:
        """The one process that a run is compared with goes on from the same checkpoint."""
        if self.saved is not None and self.job.resume is not None:
            load(self.job.resume, self.saved, part, replica=0, board=self.quiet)
