"""Triton kernels: pointers and strides in, no autograd and no modules.

Each module holds the kernels of one operator and their launchers, which allocate the results and start the grid.
The operators that users call, with checks, gradients and CPU implementations, are in ``moe_zero.ops``. Importing this
package imports Triton.
"""
