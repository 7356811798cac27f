"""These tests run kernels in Triton's interpreter, which must be switched on before Triton is imported.

``tests/triton_kernels/test_interpreter.py`` runs them in a process of their own; elsewhere they are not collected.
By hand: ``TRITON_INTERPRET=1 pytest tests/triton_kernels/interpreted``.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
