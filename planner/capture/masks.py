"""Constant attention masks folded: a lower triangle becomes is_causal, a mask of nothing goes.

Some models build a mask while they are exported where eager PyTorch calls attention with is_causal; fast attention
kernels take no mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from planner.capture.lifted import Lifted, Role, op_of
from planner.capture.trace import is_random, written_nodes

_MASK, _CAUSAL = 3, 5  # positions of attn_mask and is_causal


def fold_masks(lifted: Lifted) -> None:
    """Fold the masks of all attention ops whose values hang on nothing."""
    for node in lifted.graph.nodes:
        if node.op != "call_function" or op_of(node) is not torch.ops.aten.scaled_dot_product_attention.default:
            continue
        mask = mask_of(node)
        causal = node.args[_CAUSAL] if len(node.args) > _CAUSAL else node.kwargs.get("is_causal", False)
        if not isinstance(mask, fx.Node) or causal:
            continue
        value = _constant(mask, lifted)
        meaning = None if value is None else _meaning(value)
        if meaning is not None:
            _replace(node, causal=meaning == "causal")


def mask_of(attention: fx.Node) -> Any:
    """What an attention op is given as its mask."""
    return attention.args[_MASK] if len(attention.args) > _MASK else attention.kwargs.get("attn_mask")


def _replace(node: fx.Node, *, causal: bool) -> None:
    given = list(node.args)
    keywords = dict(node.kwargs)
    if len(given) > _MASK:
        given[_MASK] = None
    keywords.pop("attn_mask", None)
    if causal and len(given) > _CAUSAL:
        given[_CAUSAL] = True
    elif causal:
        keywords["is_causal"] = True
    node.args, node.kwargs = tuple(given), keywords


def _meaning(mask: Tensor) -> str | None:
    """What a mask says in short: ``all``, ``causal``, or None."""
    if mask.dtype is torch.bool:
        open_, shut = mask, ~mask
    else:
        open_, shut = mask == 0, mask <= torch.finfo(mask.dtype).min
    if bool(open_.all()):
        return "all"
    triangle = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    says_so = bool((open_ == triangle).all()) and bool((shut == ~triangle).all())
    return "causal" if says_so else None


def _constant(node: fx.Node, lifted: Lifted) -> Tensor | None:
    """The value of a node that depends on no parameter, buffer, input or chance, and that nobody changes in place."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one in found:
            continue
        role = lifted.roles.get(one)
        if one.op == "get_attr" or (role is not None and role[0] is not Role.CONSTANT):
            return None
        if one.op == "call_function" and is_random(one):
            return None
        if any(one in written_nodes(user) for user in one.users):
            return None
        found.add(one)
        stack.extend(one.all_input_nodes)
    values: dict[fx.Node, Any] = {}
    for one in lifted.graph.nodes:
        if one in found:
            if one in lifted.roles:
                values[one] = lifted.constants[lifted.roles[one][1]]
            else:
                args, kwargs = fx.node.map_arg((one.args, one.kwargs), values.__getitem__)
                values[one] = one.target(*args, **kwargs)
            if one is node:
                value = values[one]
                return value if isinstance(value, Tensor) else None
    return None
