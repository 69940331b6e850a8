"""What a realistic train step costs beyond raw `jax.jit`, by library and by number of Variables.

The step is the `train` of `benchmarks.dispatch`: one Adam step of a deep narrow MLP with dropout, and normalisation by
running statistics. A layer has four Variables, of which two have two moments each in the optimizer; so 1,000 Variables
of the model are 2,000 that the step replaces. The layers are as small as they can be. What is timed is still mostly
their arithmetic, for it is thousands of small operations: a ratio tells what a library adds to a step that is worth
compiling.

XLA compiles such a program of 1,000 Variables in 14 s, of 2,000 in 34 s, of 5,000 in minutes. So with 5,000 only the
fastest form of each library takes part.

    python -m benchmarks.train [--quick] [--results FOLDER]
"""

from collections.abc import Sequence

from .dispatch import BASELINE, CONTROL, SIZES, THOROUGH, Case, cases, run
from .timing import QUICK, main

TRAIN = ("train", "train, donated")
QUICK_CASES: Sequence[Case] = [("train", 10), ("train, donated", 10)]
LARGE = 5000
IN_LARGE = (
    BASELINE,
    CONTROL,
    "nnxlib, nnx.jit",
    "flax, split/merge, pure state",
    "equinox, jax.jit",
)


def takes_part(case: Case, label: str) -> bool:
    """Whether a contender is measured in a case: all are, but in the largest."""
    _, variables = case
    return variables < LARGE or label in IN_LARGE


if __name__ == "__main__":
    main(
        lambda options: (
            run(QUICK_CASES, QUICK, takes_part)
            if options.quick
            else run(cases(TRAIN, options.sizes), THOROUGH, takes_part)
        ),
        description=str(__doc__).splitlines()[0],
        packages=["jax", "jaxlib", "nnxlib", "flax", "equinox", "optax", "numpy"],
        sizes=SIZES,
    )
