"""Mixture-of-experts and ZeRO-3 kernels for PyTorch, and the Q-Former that they serve.

``import moe_zero`` needs PyTorch alone: Triton, the compiled extensions and a GPU are used where they are, and
``moe-zero doctor`` tells what is missing and what that costs.
"""

from moe_zero.drop_in import patch, unpatch

__all__ = ["patch", "unpatch"]
__version__ = "0.1.0"
