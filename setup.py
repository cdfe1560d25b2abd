"""What pyproject.toml cannot say: a shared library that Python loads by ctypes.

Without a C compiler it is left out, and decoding and training on a CPU are slower. The flags are the compiler's alone:
given to a linker, -ffast-math would change the arithmetic of the whole process.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "veritune.model.kernels._cpu",
            ["src/veritune/model/kernels/cpu.c"],
            extra_compile_args=["-O3", "-ffast-math"],
            optional=True,
        )
    ]
)
