"""Llama, Qwen2 and Qwen3 as bare tensor operations, for models so small that calling modules is what costs.

The same function as the Hugging Face forward, rearranged: the gains of the norms, the softmax scale and the constant
of the RMS are folded into the matrices that follow; Q, K and V are one matrix, as are gate and up; the two halves of
each head that rotary embedding pairs lie side by side, so that one complex product rotates queries and keys (a dot
product does not care about the order of the head's dimensions, and only this cache holds such keys). The folded
matrices are copies of the parameters, made again by `refresh`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from services.unit.engines.embedded.buckets import Bucket, buckets
from services.unit.engines.embedded.cache import KVCache
from services.unit.engines.embedded.forward import pad

_FAMILY = {"llama", "qwen2", "qwen3"}
_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}


def supports(model: Any) -> bool:
    """Whether `LeanForward` computes this model: known family, one head size, full attention, fixed rotary table."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in _FAMILY
        and config.hidden_act == "silu"
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and rope.get("rope_type", "default") in _FIXED_ROPE
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and model.dtype in (torch.float32, torch.float64)
    )


class _Layer(NamedTuple):
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_gain: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    flat: torch.Tensor


class LeanForward:
    """`Forward` for a model that `supports` accepts; `rows` x `positions` of KV cache."""

    splits = True

    def __init__(self, model: Any, rows: int, positions: int) -> None:
        config = model.config
        self._model = model
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._root = math.sqrt(config.hidden_size)
        self._eps = torch.tensor(math.sqrt(config.hidden_size * config.rms_norm_eps), dtype=model.dtype).to(
            model.device
        )
        self._positions = positions
        shape = (config.num_hidden_layers, 2, rows, self._kv_heads, positions, self._head_dim)
        self._plane = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.cache = KVCache([self._plane])
        offset = torch.arange(2, device=model.device)[:, None] * rows
        row = torch.arange(rows, device=model.device)[:, None, None]
        head = torch.arange(self._kv_heads, device=model.device)
        self._places = (((offset + row) * self._kv_heads + head) * positions).view(rows, 2 * self._kv_heads)
        half = self._head_dim // 2
        self._pairs = torch.arange(self._head_dim, device=model.device).view(2, half).t().reshape(-1)
        at = torch.arange(positions, device=model.device)[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32, device=model.device), at)
        self._rotation = torch.complex(cos[0, :, :half].to(model.dtype), sin[0, :, :half].to(model.dtype))
        self.refresh()

    def refresh(self) -> None:
        model = self._model
        self._embedding = model.model.embed_tokens.weight.detach()
        gain = model.model.norm.weight.detach() * self._root
        self._head = (model.lm_head.weight.detach() * gain).t().contiguous()
        self._layers = [self._fold(index, layer) for index, layer in enumerate(model.model.layers)]

    def _fold(self, index: int, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        normed = hasattr(attention, "q_norm")
        scale = 1.0 if normed else self._head_dim**-0.5
        q, q_bias = self._rotated(attention.q_proj, scale)
        k, k_bias = self._rotated(attention.k_proj, 1.0)
        v, v_bias = attention.v_proj.weight.detach(), _bias(attention.v_proj)
        gain = layer.input_layernorm.weight.detach() * self._root
        post = layer.post_attention_layernorm.weight.detach() * self._root
        qk_gain = None
        if normed:
            q_gain = attention.q_norm.weight.detach()[self._pairs] * self._head_dim**-0.5
            k_gain = attention.k_norm.weight.detach()[self._pairs]
            qk_gain = torch.cat([q_gain.expand(self._heads, -1), k_gain.expand(self._kv_heads, -1)])
        plane = self._plane[index]
        return _Layer(
            qkv=(torch.cat([q, k, v]) * gain).t().contiguous(),
            qkv_bias=_joined(q_bias, k_bias, v_bias),
            qk_gain=qk_gain,
            out=attention.o_proj.weight.detach().t().contiguous(),
            out_bias=_bias(attention.o_proj),
            gate_up=(torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]) * post).t().contiguous(),
            gate_up_bias=_joined(_bias(mlp.gate_proj), _bias(mlp.up_proj)),
            down=mlp.down_proj.weight.detach().t().contiguous(),
            down_bias=_bias(mlp.down_proj),
            keys=plane[0].flatten(0, 1),
            values=plane[1].flatten(0, 1),
            flat=plane.view(-1, self._head_dim),
        )

    def _rotated(self, projection: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A Q or K projection with the dimensions of each head reordered into rotary pairs."""
        weight, bias = projection.weight.detach() * scale, _bias(projection)
        order = self._pairs + torch.arange(0, len(weight), self._head_dim, device=weight.device)[:, None]
        order = order.reshape(-1)
        return weight[order], None if bias is None else bias[order] * scale

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        tokens = pad(prompts).to(self._plane.device)
        count, length = tokens.shape
        where = torch.tensor(rows, device=tokens.device)
        rotation = self._rotation[:length].repeat(count, 1).unsqueeze(1)
        x = self._embedding[tokens.view(-1)]
        for index, layer in enumerate(self._layers):
            qkv = self._project(x, layer, rotation).view(count, length, -1, self._head_dim).transpose(1, 2)
            q, k, v = qkv.split([self._heads, self._kv_heads, self._kv_heads], dim=1)
            self._plane[index, 0, where, :, :length] = k
            self._plane[index, 1, where, :, :length] = v
            if index == len(self._layers) - 1:
                return
            grouped = self._heads != self._kv_heads
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=grouped)
            x = self._finish(x, a.transpose(1, 2).reshape(count * length, -1), layer)

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        device = self._plane.device
        batch = len(tokens)
        at = torch.from_numpy(positions).to(device)
        places = self._places[:batch] + at.unsqueeze(-1)
        rotation = self._rotation[at].unsqueeze(1)
        parts = [(part, self._mask(at, part)) for part in buckets(positions + 1)]
        x = self._embedding[torch.from_numpy(tokens).to(device)]
        width = self._heads * self._head_dim
        for layer in self._layers:
            qkv = self._project(x, layer, rotation)
            layer.flat.index_put_((places,), qkv[:, width:].view(batch, 2 * self._kv_heads, self._head_dim))
            q = qkv[:, :width].reshape(batch * self._kv_heads, -1, self._head_dim)
            a = self._attend(q, layer, parts).view(batch, width)
            x = self._finish(x, a, layer)
        return self._norm(x) @ self._head

    def _mask(self, at: torch.Tensor, part: Bucket) -> torch.Tensor:
        """Additive mask [part's rows, 1, part's positions]: -inf past each row's position."""
        past = torch.arange(part.positions, device=at.device) > at[part.start : part.end, None]
        mask = torch.zeros(past.shape, dtype=self._plane.dtype, device=at.device)
        return mask.masked_fill_(past, -torch.inf).unsqueeze(1)

    def _attend(self, q: torch.Tensor, layer: _Layer, parts: list[tuple[Bucket, torch.Tensor]]) -> torch.Tensor:
        """`q`: [rows * kv_heads, queries per kv head, head_dim]; the same shape comes back."""
        outputs = []
        for part, mask in parts:
            rows = slice(part.start * self._kv_heads, part.end * self._kv_heads)
            keys = layer.keys[rows, : part.positions]
            scores = torch.bmm(q[rows], keys.transpose(1, 2))
            scores.view(part.end - part.start, self._heads, part.positions).add_(mask)
            outputs.append(torch.bmm(torch.softmax(scores, -1), layer.values[rows, : part.positions]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm without its gain and without the root of the width: both are in the next matrix."""
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._eps)

    def _project(self, x: torch.Tensor, layer: _Layer, rotation: torch.Tensor) -> torch.Tensor:
        """Q, K and V of tokens `x` [tokens, hidden], rotated: [tokens, (heads + 2 kv_heads) * head_dim]."""
        qkv = _linear(self._norm(x), layer.qkv, layer.qkv_bias)
        rotated = self._heads + self._kv_heads
        qk = qkv[:, : rotated * self._head_dim].view(len(x), rotated, self._head_dim)
        if layer.qk_gain is not None:
            eps = self._model.config.rms_norm_eps
            qk.copy_(F.rms_norm(qk, (self._head_dim,), None, eps).mul_(layer.qk_gain))
        torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(rotation)
        return qkv

    def _finish(self, x: torch.Tensor, attended: torch.Tensor, layer: _Layer) -> torch.Tensor:
        """The output projection, the MLP and both residuals."""
        x = _residual(x, attended, layer.out, layer.out_bias)
        gate_up = _linear(self._norm(x), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, dim=-1)
        return _residual(x, F.silu(gate).mul_(up), layer.down, layer.down_bias)


def _bias(projection: Any) -> torch.Tensor | None:
    return None if projection.bias is None else projection.bias.detach()


def _joined(*biases: torch.Tensor | None) -> torch.Tensor | None:
    given = [bias for bias in biases if bias is not None]
    return torch.cat(given) if given else None


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _residual(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    x = torch.addmm(x, y, weight)
    return x if bias is None else x.add_(bias)
