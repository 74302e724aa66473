"""The forms in which the package's Triton kernels are compiled, and what a compiler for GPUs makes of them.

As a script it compiles those of the names given (all without any) for each `--capability`, which needs no GPU, and
prints one JSON object: "name capability" -> registers of a thread, bytes of local memory of a thread, bytes of memory
that a block shares, its threads, and the instruction by which it multiplies matrices (none: "").
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

MODULES = (
    "hybrid_rl.models.heads.triton_logprobs",
    "hybrid_rl.engines.inplace.triton_decode",
    "hybrid_rl.engines.triton_sampling",
)


class Form(NamedTuple):
    """As `specialisations` of a module gives it: signature has the types of the arguments that are no constants."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


def forms() -> Iterator[Form]:
    """Those of all modules, each name once; of one of each kernel of the head also what a launch with every count 1
    compiles, where Triton takes them for constants."""
    for name in MODULES:
        for form in (Form(*form) for form in import_module(name).specialisations()):
            yield form
            if form.name.endswith("-fp32-1000"):
                ones = [name for name, kind in form.signature.items() if kind == "i32" and not name.endswith("stride")]
                signature = {name: kind for name, kind in form.signature.items() if name not in ones}
                constants = form.constants | dict.fromkeys(ones, 1)
                yield form._replace(name=f"{form.name}-ones", signature=signature, constants=constants)


def kernels_of(module: Any) -> set[str]:
    """The kernels that a module launches: what stands before a grid, `kernel[grid](...)`."""
    return {name.rsplit(".", 1)[-1] for name in re.findall(r"([\w.]+)\[\s*\(.*?\)\s*\]\(", inspect.getsource(module))}


def compile_form(form: Form, capability: int) -> dict[str, Any]:
    """What the machine code of a form uses on a GPU of this capability (90: Hopper)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hints, signature, constants = {}, {}, {}
    for place, name in enumerate(form.kernel.arg_names):
        if name in form.constants:
            signature[name], constants[(place,)] = "constexpr", form.constants[name]
            continue
        signature[name] = form.signature[name]
        # As a launch finds them: memory of PyTorch's allocator, and rows of whole words.
        if signature[name].startswith("*") or "stride" in name or "_from_" in name:
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=form.kernel, signature=signature, constexprs=constants, attrs=hints)
    options = {"num_warps": form.num_warps, "num_stages": form.num_stages}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, local = _usage(done.asm["cubin"])
    return {
        "registers": registers,
        "local_bytes": local,
        "shared_bytes": done.metadata.shared,
        "threads": 32 * done.metadata.num_warps,
        "multiplies": next((word for word in ("wgmma", "mma.sync") if word in done.asm["ptx"]), ""),
    }


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, of a thread: what does not fit into registers lies there."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", text)
    (registers, stack, local) = map(int, found[-1])
    return registers, stack + local


def main() -> None:
    """Compile, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--capability", type=int, nargs="+", default=[90])
    parser.add_argument(
        "--list", action="store_true", help="print names, kernels and what is launched; compile nothing"
    )
    given = parser.parse_args()
    every = list(forms())
    if given.list:
        launched = sorted(set().union(*(kernels_of(import_module(module)) for module in MODULES)))
        names = [[form.name, form.kernel.__name__] for form in every]
        print(json.dumps({"forms": names, "launched": launched, "triton": version("triton")}))
        return
    wanted = [form for form in every if form.name in given.names or not given.names]
    print(json.dumps({f"{f.name} {c}": compile_form(f, c) for c in given.capability for f in wanted}))


if __name__ == "__main__":
    main()
