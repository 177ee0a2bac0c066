"""sloplet/code: sloplet/base with what cells of code expect: numpy, pandas, matplotlib, Pillow, TypeScript."""

from __future__ import annotations

from ..build.image import Image

NEEDS = "sloplet/base"

#: matplotlib 3.11 has no ``boxplot(labels=)``, which is what everybody writes.
PYTHON = ("numpy", "pandas", "matplotlib<3.11", "pillow")
#: From 7 on it is a program, without the functions that strip types.
NODE = ("typescript@5",)

#: Imported and used once, so that nobody waits for it later: drawing makes matplotlib look for its fonts. Nothing of it
#: stays among the names of the kernel.
WARM = """
def _warm():
    import io
    import numpy, pandas
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    frame = pandas.DataFrame({"x": numpy.arange(4), "y": numpy.arange(4) ** 2})
    figure, axes = plt.subplots()
    axes.plot(frame.x, frame.y)
    axes.set_title("warm")
    figure.savefig(io.BytesIO(), format="png")
    plt.close("all")
    frame.describe().to_html()

_warm()
del _warm
"""


def image() -> Image:
    return (
        Image("sloplet/base")
        .user("root")
        .pip(*PYTHON)
        .npm(*NODE)
        .env(MPLBACKEND="Agg")
        .label({"org.opencontainers.image.title": "sloplet/code"})
        .user("agent")
    )
