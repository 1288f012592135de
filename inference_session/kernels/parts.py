"""Kernels that other kernels call, as parts of them.

Numba would optimize each part and make machine code of it, which nothing runs, and then do the same with its code
inside each kernel that calls it. That takes as long again as all else. Here a part is only translated for LLVM and
simplified. What Python calls is optimized with all of its parts, and is what is kept on disk.

A part may not raise errors whose messages are computed, nor print: it has no environment, which such code reads. A
kernel may not call itself.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering


class Kernel(CPUDispatcher):
    """Compiled by itself for calls from Python, and as a part for kernels that call it."""

    @cached_property
    def _part(self) -> Any:
        options = {**self.targetoptions, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return CPUDispatcher(self.py_func, targetoptions=options, pipeline_class=_PartCompiler)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Asked by Numba for the types of a call in another kernel."""
        return self._part.get_call_template(args, kws)

    def get_overload(self, sig: Any) -> Any:
        """Asked by Numba for the function that another kernel is to call."""
        return self._part.get_overload(sig)


class _PartCompiler(CompilerBase):
    """As Numba's own, with another library for the code."""

    def define_pipelines(self) -> list[Any]:
        passes: Any = DefaultPassBuilder.define_nopython_pipeline(self.state)  # type: ignore[no-untyped-call]
        passes.passes = [(_LowerPart if one is NativeLowering else one, text) for one, text in passes.passes]
        passes.finalize()
        return [passes]


@register_pass(mutates_CFG=True, analysis_only=False)  # type: ignore[no-untyped-call]
class _LowerPart(NativeLowering):
    _name = "lower_part"

    def run_pass(self, state: Any) -> Any:
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)  # type: ignore[no-untyped-call]
        return super().run_pass(state)  # type: ignore[no-untyped-call]


class _PartLibrary(JITCodeLibrary):
    """Code that is linked into kernels, and of which the engine that makes machine code knows nothing."""

    def _optimize_final_module(self) -> None:
        """The first of Numba's two steps. Without it, some look-ups take 3 % longer."""
        cheap: Any = {"opt": 0, "loop_vectorize": False, "slp_vectorize": False, "cost": "cheap"}
        passes, builder = self._codegen._module_pass_manager(**cheap)  # type: ignore[no-untyped-call]
        passes.run(self._final_module, builder)

    def _finalize_final_module(self) -> None:
        self._finalized = True

    @property
    def codegen(self) -> Any:
        return _NoEnvironments


class _NoEnvironments:
    @staticmethod
    def set_env(env_name: str, env: Any) -> None:
        """Where the engine has no code, it has no place for one."""
