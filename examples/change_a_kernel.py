"""A kernel changed by hand, in a bundle beside the generated one: how to try an idea before it becomes a template.

    flintc compile flint --weights nvfp4 -o generated        # sources lie in generated/kernels
    cp generated/kernels/topk_6of256.py mine.py              # edit mine.py
    python examples/change_a_kernel.py generated topk_6of256 mine.py -o changed
    flintc bench bundles generated changed --kernel topk     # on the GPU: times in turn, and whether the bits are equal

The changed source is proved safe under dependent launch, compiled, and held against what it states, as any other.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from flintc.bundle import Bundle, Origin, build_bundle, load_bundle, write_bundle
from flintc.codegen.aot import compile_kernels
from flintc.codegen.effects import effects_of
from flintc.codegen.lint import check_compiled
from flintc.errors import FlintcError
from flintc.safety import check_plan


def changed(bundle: Bundle, name: str, source: str, warps: int | None = None, registers: int | None = None) -> Bundle:
    """``bundle`` with another source, warps or registers a thread (0: no limit) for the kernel called ``name``."""
    old = bundle.plan.kernels[name]
    kernel = replace(
        old,
        source=source,
        paths=effects_of(source, name, old.params, old.constants),
        num_warps=warps or old.num_warps,
        max_registers=old.max_registers if registers is None else registers,
    )
    plan = replace(bundle.plan, kernels={**bundle.plan.kernels, name: kernel})
    check_plan(plan)
    compiled = compile_kernels([kernel], bundle.manifest.targets)
    check_compiled({name: kernel}, compiled.values())
    made = bundle.manifest
    origin = Origin(made.spec, made.spec_sha256, made.weights, made.pipeline, made.batches)
    return build_bundle(plan, {**bundle.compiled, **compiled}, origin)


def main() -> None:
    """Read the command line and write the changed bundle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("kernel")
    parser.add_argument("source", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--warps", type=int)
    parser.add_argument("--registers", type=int)
    asked = parser.parse_args()
    try:
        bundle, source = load_bundle(asked.bundle), asked.source.read_text(encoding="utf-8")
        if asked.kernel not in bundle.plan.kernels:
            parser.error(f"no kernel of a step is called {asked.kernel}: {', '.join(bundle.plan.kernels)}")
        made = write_bundle(changed(bundle, asked.kernel, source, asked.warps, asked.registers), asked.out)
    except (FlintcError, OSError) as error:
        parser.error(str(error))
    for (name, target), compiled in made.compiled.items():
        if name == asked.kernel:
            print(f"{name} for {target}: {compiled.registers} registers, {compiled.spills} bytes spilled")
    if several := bundle.plan.kernels[asked.kernel].several:
        print(f"steps of more than one row run {several}, which is as it was")


if __name__ == "__main__":
    main()
