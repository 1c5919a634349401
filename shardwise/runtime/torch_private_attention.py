"""Private names of PyTorch's attention kernels; torch_private.py has all others.

All were checked on torch 2.13.0 (``torch_private.CHECKED``).
"""

from __future__ import annotations

from typing import Any

from shardwise.runtime.torch_private import aten

flash_attention: Any = aten._scaled_dot_product_flash_attention
flash_attention_backward: Any = aten._scaled_dot_product_flash_attention_backward
flash_attention_varlen: Any = aten._flash_attention_forward
flash_attention_varlen_backward: Any = aten._flash_attention_backward
flash_attention_for_cpu: Any = aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_for_cpu_backward: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward
efficient_attention: Any = aten._scaled_dot_product_efficient_attention
efficient_attention_backward: Any = aten._scaled_dot_product_efficient_attention_backward
math_attention: Any = aten._scaled_dot_product_attention_math
cudnn_attention: Any = aten._scaled_dot_product_cudnn_attention
attention_by_default: Any = aten.scaled_dot_product_attention.default.decompose
"""The attention kernels. Ring attention merges parts by the logarithms that the public function does not return, and
the dry run calls the kernel that the target would. The last is PyTorch's own choice, past
``torch_private_kernels.override_kernel``."""
