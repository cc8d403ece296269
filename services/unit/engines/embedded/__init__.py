"""The embedded engine: continuous batching with torch and transformers alone, on one thread of its own.

`tests/bench/embedded_engine.py` compares its two forwards with a plain loop over a `DynamicCache`. Tokens per second
of wall time, 1.07M parameters (Qwen2, hidden 128, 4 layers), float32, one thread, 24 + 64 tokens, turns taken one
after the other on a 2-core machine that was about four times oversubscribed; only rough ratios mean anything:

| sequences | plain loop | generic | lean |
| --- | --- | --- | --- |
| 1 | 73 | 45 | 154 |
| 8 | 338 | 360 | 824 |
| 32 | 1188 | 1852 | 4138 |
| 64 | 2121 | 3053 | 3417 |
| 128 | 2821 | 3413 | 5202 |
| 256 | 3204 | 3635 | 4486 |

`LeanForward` runs for Llama, Qwen2 and Qwen3 in float32 and float64; `GenericForward` for all else.
`EmbeddedEngine(config, generic=True)` forces the latter. CUDA takes the same code and was not run on a GPU.
"""

from services.unit.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
