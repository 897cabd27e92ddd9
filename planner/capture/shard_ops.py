"""What the ops of a tensor rank's graph do beside torch's own: collectives, and random numbers drawn for all ranks.

``enter`` and ``leave`` are Megatron-LM's f and g: where a whole tensor enters ops that each rank does a part of, its
gradient is the sum of the ranks'; where such ops end in a sum, the ranks add their parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from planner.capture.seeds import folded
from planner.capture.shard_split import Split

aten = torch.ops.aten


class TensorGroup(Protocol):
    """The ranks that share a layer; every call waits for its end and gives all of them the same bits."""

    def sum(self, tensor: Tensor) -> None:
        """Put the sum over the ranks into a contiguous tensor."""

    def max(self, tensor: Tensor) -> None:
        """Put the largest over the ranks into a contiguous tensor."""

    def gather(self, tensor: Tensor, size: int) -> list[Tensor]:
        """The contiguous tensors of all ``size`` ranks, in their order."""

    def start_scatter(self, own: Tensor, whole: Tensor) -> Any:
        """Begin to put into ``own`` this rank's of the equal parts of ``whole`` summed over the ranks, both flat."""

    def finish_sum(self, work: Any) -> None:
        """Wait for what was begun."""


class _Gathered:
    """What ranks gathered of their parts: kept as this rank's part, and gathered again when a backward needs it."""

    def __init__(self, part: Tensor, split: Split, collectives: Collectives) -> None:
        self._part, self._split, self._collectives = part, split, collectives
        self._whole: Tensor | None = None

    def whole(self) -> Tensor:
        """All of it; gathered once for all ops of a layer, in the same order on all ranks."""
        if self._whole is None:
            self._whole = self._collectives.gathered(self._part, self._split)
        return self._whole

    def let_go(self) -> None:
        """Their backwards have run."""
        self._whole = None


class Collectives:
    """The functions that a rank's graph calls. Without a ``group`` nothing is exchanged: for tracing and timing."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank
        self.group: TensorGroup | None = None
        self._gathered: dict[int, tuple[StorageWeakRef, _Gathered]] = {}

    def keeping_parts(self) -> contextlib.AbstractContextManager[Any]:
        """Within it what is gathered is kept for the backward as this rank's part alone."""
        self._gathered.clear()
        return torch.autograd.graph.saved_tensors_hooks(self._kept, _taken_out)

    def note_gathered(self, whole: Tensor, kept: _Gathered) -> None:
        """Know it again where an op keeps it."""
        storage = whole.untyped_storage()
        self._gathered[storage._cdata] = StorageWeakRef(storage), kept

    def _kept(self, tensor: Tensor) -> Any:
        _, kept = self._gathered.get(tensor.untyped_storage()._cdata, (None, None))
        if kept is None:
            return tensor
        return kept, tensor.shape, tensor.stride(), tensor.storage_offset()

    def enter(self, x: Tensor) -> Tensor:
        """A whole tensor as the ops of one layer read it that do a part each."""
        return _Enter.apply(x, self)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, x: Tensor) -> Tensor:
        """The sum of the ranks' parts."""
        return _Leave.apply(x, self)  # type: ignore[no-any-return,no-untyped-call]

    def leave_in_parts(self, x: Tensor, dim: int, sections: list[int]) -> Tensor:
        """This rank's part of the sum of the ranks' parts."""
        return _LeaveInParts.apply(x, Split(dim, tuple(sections)), self)  # type: ignore[no-any-return,no-untyped-call]

    def gather(self, x: Tensor, dim: int, sections: list[int]) -> Tensor:
        """The whole of what each rank has a part of, as ops read it that every rank does alike."""
        return _Gather.apply(x, Split(dim, tuple(sections)), self)  # type: ignore[no-any-return,no-untyped-call]

    def gather_entering(self, x: Tensor, dim: int, sections: list[int]) -> Tensor:
        """The whole of what each rank has a part of, as the ops of one layer read it that do a part each."""
        return _GatherEntering.apply(x, Split(dim, tuple(sections)), self)  # type: ignore[no-any-return,no-untyped-call]

    def gathered(self, part: Tensor, split: Split) -> Tensor:
        """The whole of what each rank has a part of."""
        part = part.contiguous()
        parts = [part] * self.size if self.group is None else self.group.gather(part, self.size)
        return split.whole(parts)

    def scattered(self, tensor: Tensor, split: Split) -> Tensor:
        """This rank's part of the sum over the ranks."""
        parts = torch.stack([split.part(tensor, self.size, rank) for rank in range(self.size)])
        own = torch.empty_like(parts[0]) if self.group is not None else parts[self.rank].clone()
        if self.group is not None:
            self.group.finish_sum(self.group.start_scatter(own.view(-1), parts.view(-1)))
        return own

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, laid out as the tensor is (dense)."""
        out = tensor.clone()
        if self.group is not None:
            self.group.sum(out.as_strided((out.numel(),), (1,)))
        return out

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest over the ranks, put into the tensor."""
        if self.group is not None:
            self.group.max(tensor)
        return tensor

    def cross_entropy(
        self,
        logits: Tensor,
        target: Tensor,
        first: int,
        classes: int,
        reduction: int,
        ignored: int,
        smoothing: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """Cross entropy of logits [samples, classes held here, ...]: classes ``first``, ... of ``classes`` in all."""
        last = logits.movedim(1, -1) if logits.dim() > 1 else logits
        settings = (first, classes, ignored, smoothing, dtype)
        rows: Tensor = _CrossEntropy.apply(last, target, settings, self)  # type: ignore[no-untyped-call]
        if reduction == _NONE:
            return rows
        total: Tensor = rows.sum()
        if reduction == _SUM:
            return total
        return total / (target != ignored).sum().to(total.dtype)

    def dropout(
        self, x: Tensor, p: float, shape: list[int], stride: list[int], dim: int, sections: list[int]
    ) -> Tensor:
        """Dropout that draws for the whole tensor, as one process does on the CPU, and takes this rank's part.

        On CUDA each rank draws for its own part alone, in torch's fused kernel.
        """
        if x.is_cuda:
            with self._drawing_apart(x.device):
                return torch.dropout(x, p, True)
        whole = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)
        noise = Split(dim, tuple(sections)).part(whole.bernoulli_(1 - p), self.size, self.rank)
        return x * (noise / (1 - p) if p < 1 else noise)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        p: float,
        causal: bool,
        scale: float | None,
        grouped: bool,
        shape: list[int],
        dim: int,
        sections: list[int],
    ) -> Tensor:
        """Attention with dropout: its noise of ``shape`` (scores of all ranks) is drawn as one process draws it.

        The steps are those of torch's own composite, which is what has dropout on the CPU. On CUDA each rank draws for
        its own heads alone, in torch's fused kernel.
        """
        if query.is_cuda:
            with self._drawing_apart(query.device):
                return torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, mask, p, causal, scale=scale, enable_gqa=grouped
                )
        noise = torch.empty(shape, dtype=query.dtype, device=query.device).bernoulli_(1 - p)
        factor = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        if grouped:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        scores = (query * factor) @ (key * factor).transpose(-2, -1)
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
        kept = Split(dim, tuple(sections)).part(noise, self.size, self.rank)
        made: Tensor = (scores.softmax(-1) * (kept / (1 - p) if p < 1 else kept)) @ value
        return made

    @contextlib.contextmanager
    def _drawing_apart(self, device: torch.device) -> Iterator[None]:
        """Within it each rank draws other numbers on a CUDA device; after it all go on alike."""
        generator = torch.cuda.default_generators[device.index or 0]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.manual_seed(folded(seed, offset, self.rank))
        try:
            yield
        finally:
            generator.manual_seed(seed)
            generator.set_offset(offset + 4)


Collectives.dropout.draws = True  # type: ignore[attr-defined]
Collectives.attention.draws = True  # type: ignore[attr-defined]
Collectives.enter.exchanges = True  # type: ignore[attr-defined]
Collectives.leave.exchanges = True  # type: ignore[attr-defined]
Collectives.leave_in_parts.exchanges = True  # type: ignore[attr-defined]
Collectives.gather.exchanges = True  # type: ignore[attr-defined]
Collectives.gather_entering.exchanges = True  # type: ignore[attr-defined]

_NONE, _SUM = 0, 2  # torch's reductions; 1 is the mean


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.collectives = collectives
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None if gradient is None else ctx.collectives.summed(gradient), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.set_materialize_grads(False)
        return collectives.summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return gradient, None


class _LeaveInParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, collectives: Collectives) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.split, ctx.collectives = split, collectives
        return collectives.scattered(x, split)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None if gradient is None else ctx.collectives.gathered(gradient, ctx.split), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, collectives: Collectives) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.split, ctx.collectives = split, collectives
        return collectives.gathered(x, split)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None
        part = ctx.split.part(gradient, ctx.collectives.size, ctx.collectives.rank)
        return part.clone(memory_format=torch.contiguous_format), None, None


class _GatherEntering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, collectives: Collectives) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.split, ctx.collectives = split, collectives
        ctx.save_for_backward(x)  # so that it counts as kept
        ctx.kept = _Gathered(x.detach(), split, collectives)
        whole = collectives.gathered(x, split)
        collectives.note_gathered(whole, ctx.kept)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        ctx.kept.let_go()
        return None if gradient is None else ctx.collectives.scattered(gradient, ctx.split), None, None


def _taken_out(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    gathered, shape, stride, offset = kept
    whole: Tensor = gathered.whole()
    return whole.as_strided(shape, stride, offset)


class _CrossEntropy(torch.autograd.Function):
    """Loss of each sample; the logits' last dimension is split over the ranks.

    With l = log sum exp(logits) over the classes of all ranks, put together from those of each rank:

        loss = l - (1 - e) · logit of the target - e · mean logit,   e: label smoothing
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        settings: tuple[int, int, int, float, torch.dtype],
        collectives: Collectives,
    ) -> Tensor:
        first, classes, ignored, smoothing, dtype = settings
        exact = torch.float32 if logits.dtype in (torch.bfloat16, torch.float16) else logits.dtype
        logs = torch.log_softmax(
            logits, -1, dtype=exact
        )  # in one kernel; its largest entry is exact where it is near 0
        own = logits.amax(-1).to(exact) - logs.amax(-1)
        largest = collectives.largest(own.clone())
        place = target - first
        here = (place >= 0) & (place < logits.shape[-1])
        place = place.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        of_target = logits.gather(-1, place).squeeze(-1).to(exact) * here
        parts = [(own - largest).exp(), of_target, *([logits.sum(-1, dtype=exact)] if smoothing else [])]
        total, of_target, *of_all = collectives.summed(torch.stack(parts)).unbind()
        whole = total.log() + largest
        loss = whole - (1 - smoothing) * of_target
        if smoothing:
            loss = loss - smoothing / classes * of_all[0]
        counted = target != ignored
        ctx.save_for_backward(logs, own - whole, place, here & counted, counted)
        ctx.share, ctx.smoothing, ctx.dtype = smoothing / classes, smoothing, logits.dtype
        return torch.where(counted, loss, 0.0).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logs, shift, place, here, counted = ctx.saved_tensors
        made = (logs + shift.unsqueeze(-1)).exp_()  # the softmax
        if ctx.share:
            made -= ctx.share
        made.scatter_add_(-1, place, (here.to(made.dtype) * (ctx.smoothing - 1)).unsqueeze(-1))
        made *= (gradient * counted).unsqueeze(-1)
        return made.to(ctx.dtype), None, None, None
