"""One process of a run: trains with what planner.runtime.assembly makes, saves, compares, and tells how it went."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from planner.allocator import keep_freed_memory
from planner.capture import Batch, Capture, ModelFile, capture_as, load_model_file
from planner.errors import InputError
from planner.runtime.assembly import assemble
from planner.runtime.board import Board, State
from planner.runtime.checkpoint import Checkpoints, Content, Part, check, content_of, load
from planner.runtime.data import check_same, is_checked, like
from planner.runtime.failure import Failure, Where, place, raised
from planner.runtime.figures import RankFigures
from planner.runtime.groups import LostContactError
from planner.runtime.job import Place, RunJob
from planner.runtime.parent import end_with_parent
from planner.runtime.reference import Reference, compare, train_whole
from planner.runtime.saved import Saved, SavedBatch, SavedModel, read_saved, remove_unfinished
from planner.runtime.trainer import Shape
from planner.runtime.weights import whole_weights
from planner.schedules import out_of_order

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
    end_with_parent(job.folder, local_size)
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
            _Worker(job, job.place_of(global_rank), local_rank, store, board).run()
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


class _Worker:
    """One process of a run."""

    def __init__(self, job: RunJob, place: Place, local_rank: int, store: Store, board: Board) -> None:
        self.job = job
        self.place = place
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
        fingerprint = job.plan.model.fingerprint
        captured = self._capture(model_file, fingerprint)
        if captured.fingerprint != fingerprint:
            raise InputError(
                f"{job.model_path}: the model is not the one that the plan was made for "
                f"(fingerprint {captured.fingerprint[:12]}, the plan's {fingerprint[:12]})",
                hint="profile and solve again, or restore the model file",
            )
        self.example = captured.batch
        if self.saved is not None:
            self._check_checkpoint(model_file, self.saved)
        self.writer.at(State.STARTING)
        reference = self._train_whole(model_file, captured)
        self.made = assemble(
            job, self.place, captured, model_file=model_file, store=self.store, device=self.device, board=self.writer
        )
        self._resume()
        self._barrier()
        figures = self._train(model_file, reference)
        self.writer.at(State.ENDING)
        self._report(figures)

    def _check_same_everywhere(self) -> None:
        if self.place.process == 0:
            self.store.set("run", uuid.uuid4().hex[:12])
            self.store.set("digest", self.job.digest)
        elif self.store.get("digest").decode() != self.job.digest:
            raise InputError(
                f"rank {self.place.process} was started with another plan or other options than rank 0",
                hint="start the same command with the same plan on every machine",
            )

    def _capture(self, model_file: ModelFile, fingerprint: str) -> Capture:
        """The model, in the layers that ``fingerprint`` speaks of where it has such."""
        job = self.job
        return capture_as(
            model_file,
            fingerprint=fingerprint,
            microbatch_size=job.plan.batch.microbatch,
            device=str(self.device),
            seed=job.seed,
            weightless=job.in_parts,
        )

    def _barrier(self) -> None:
        self.made.control.barrier()

    def _batches(self, model_file: ModelFile) -> Iterator[Batch]:
        """The data of the steps that this run does, each batch of the shapes that the model was captured with."""
        job = self.job
        batches = model_file.data(
            job.plan.batch.global_batch, seed=job.seed, first=job.start, skipped=lambda: self.writer.at(State.DATA)
        )
        return like(self.example, batches, model_file, first=job.start)

    # --- training -----------------------------------------------------------------------------------------------------

    def _train(self, model_file: ModelFile, reference: Reference | None) -> RankFigures:
        """All steps; after the first ``verify_steps`` the comparison with one process."""
        job, trainer = self.job, self.made.trainer
        batches = self._batches(model_file)
        figures = RankFigures(trainer)
        checkpoints = self._checkpoints()
        ended = time.perf_counter()
        for step in range(job.start, job.steps):
            self.writer.step(step)
            batch = next(batches)
            if trainer.reads_data and is_checked(step - job.start):
                check_same(batch, model_file, self.store, process=self.place.process, step=step)
            record = trainer.step(step, batch)
            figures.add(record)
            now = time.perf_counter()
            self.writer.done(step, loss=record.loss, seconds=now - ended)
            ended = now
            verified = step + 1 == job.start + job.verify_steps
            saved = checkpoints is not None and self._is_due(step + 1)
            if verified:
                self.writer.at(State.VERIFYING)
                self._compare(figures, reference)
            if checkpoints is not None and saved:
                checkpoints.save(step + 1, self._content())
            if verified or saved:
                self._barrier()
                figures.begin()
                ended = time.perf_counter()
        return figures

    def _is_due(self, step: int) -> bool:
        """Whether there is a checkpoint before step ``step``."""
        every = self.job.checkpoint_every
        return step == self.job.steps or (every is not None and step % every == 0)

    def _compare(self, figures: RankFigures, reference: Reference | None) -> None:
        """Set the weights and losses so far beside those of one process, on process 0."""
        losses = torch.tensor(figures.losses, dtype=torch.float64)
        source, process = self.made.loss_process, self.place.process
        if source and process == source:
            self.made.control.send(losses, 0)
        if source and process == 0:
            self.made.control.receive(losses, source)
        weights = self._whole_weights()
        if reference is None:
            for _ in weights:
                pass
        else:
            sizes = self.job.plan.parallel
            exact = sizes.data <= 2 and sizes.tensor == 1 and not out_of_order(self.job.schedule)
            self.verified = compare(reference, weights, losses.tolist(), exact=exact)

    def _train_whole(self, model_file: ModelFile, captured: Capture) -> Reference | None:
        """The first steps in this one process, if it is the one to compare."""
        job = self.job
        if not job.verify_steps or self.place.process:
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

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters at process 0."""
        made = self.made
        splits = made.parts.splits if made.parts is not None else {}
        return whole_weights(
            made.trainer.parameters | dict(made.unused),
            made.control,
            self.place.process,
            made.tellers,
            splits=splits,
            tensor=self.job.plan.parallel.tensor,
        )

    def _report(self, figures: RankFigures) -> None:
        """Leave this process's part of the result in the store."""
        made, process = self.made, self.place.process
        digest = hashlib.sha256()
        for _, weight in self._whole_weights():
            digest.update(weight.reshape(-1).view(torch.uint8).numpy().data)
        told = figures.told(rows=self.job.record) | {
            "clock_s": figures.clock_s if self.job.one_node else None,
            "rank": self.place.rank,
            "has_loss": process == made.loss_process,
            "peak_memory_bytes": made.trainer.peak_memory_bytes(),
            "trainable_bytes": made.trainer.trainable_bytes,
            "weights_sha256": digest.hexdigest() if process == 0 else None,
            "verify": self.verified,
        }
        self.store.set(f"result/{process}", json.dumps(told))
        made.transport.close()
        self._barrier()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _check_checkpoint(self, model_file: ModelFile, saved: Saved) -> None:
        """That it is of this model, whatever layers the plan sees in it, and this process's share of its files."""
        job = self.job
        assert job.resume is not None
        fingerprint = saved.model.fingerprint
        known = fingerprint == job.plan.model.fingerprint
        if not known and self._capture(model_file, fingerprint).fingerprint != fingerprint:
            raise InputError(
                f"{job.resume}: is a checkpoint of another model ({saved.model.name}, {fingerprint[:12]})",
                hint="name its own folder with --checkpoint, or restore the model file",
            )
        check(job.resume, saved, process=self.place.process, num_processes=job.num_processes, board=self.writer)

    def _resume(self) -> None:
        """Go on from the checkpoint, once every process has found its share of it whole."""
        made = self.made
        if self.saved is not None and self.job.resume is not None:
            self._barrier()
            replica = self.place.replica
            load(self.job.resume, self.saved, made.trainer, replica=replica, board=self.writer, parts=made.parts)

    def _restore_whole(self, part: Part) -> None:
        """The one process that a run is compared with goes on from the same checkpoint."""
        if self.saved is not None and self.job.resume is not None:
            load(self.job.resume, self.saved, part, replica=0, board=self.quiet)

    def _checkpoints(self) -> Checkpoints | None:
        job, plan = self.job, self.job.plan
        if job.checkpoints is None:
            return None
        if self.place.process == 0 and job.checkpoints.is_dir():
            remove_unfinished(job.checkpoints)
        return Checkpoints(
            folder=job.checkpoints,
            run=self.store.get("run").decode(),
            process=self.place.process,
            num_processes=job.num_processes,
            control=self.made.control,
            board=self.writer,
            seed=job.seed,
            model=SavedModel(name=plan.model.name, fingerprint=plan.model.fingerprint),
            batch=SavedBatch(
                global_batch=plan.batch.global_batch, microbatch=plan.batch.microbatch, data=plan.parallel.data
            ),
        )

    def _content(self) -> Content:
        """What this process writes; the first one also what no stage uses."""
        made, place, sizes = self.made, self.place, self.job.plan.parallel
        trainer, control = made.trainer, made.control
        mine = {name for name, rank in made.writing_ranks.items() if rank == place.rank}
        state = None
        if trainer.shards is not None and trainer.optimizer is not None:
            first = place.process - place.replica * sizes.tensor
            processes = [first + replica * sizes.tensor for replica in range(sizes.data)]
            state = trainer.shards.whole_state(trainer.optimizer, sorted(mine), control=control, processes=processes)
        content = content_of(trainer, rank_writes=mine, replica=place.replica, replicas=sizes.data, state=state)
        if made.parts is not None:
            content.tensors = made.parts.wholes(content.tensors, trainer.parameters, control, place.process)
            if place.tensor_rank:
                content.optimizer = {}
        content.tensors |= made.unused
        return content
