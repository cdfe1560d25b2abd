"""Run as an ordinary user by test_sandbox.py: prints what came of a benign and of the named hostile programs."""

import json
import os
import sys
import tempfile

from hostile_programs import HOSTILE

from veritune.discovery.sandbox import REQUIRED_LAYERS, Limits, SandboxLevel, probe_sandbox, run_program


def main() -> None:
    level = SandboxLevel(tuple(layer for layer in probe_sandbox().layers if layer in REQUIRED_LAYERS), {})
    limits = Limits(seconds=2.0, memory_mb=512, output_mb=4)
    errors = {}
    with tempfile.TemporaryDirectory() as outside:
        with open(f"{outside}/secret", "w") as file:
            file.write("very-secret")
        for name in sys.argv[1:]:
            source = HOSTILE[name][0].replace("{outside}", outside).replace("{pid}", str(os.getpid()))
            errors[name] = run_program(source.replace("{port}", "9"), limits, level).error
        if sorted(os.listdir(outside)) != ["secret"]:
            raise SystemExit("something was written outside of the scratch folder")
    numpy_result = run_program("import numpy as np\npoints = np.array([3, 5])", limits, level)
    print(json.dumps({"level": level.layers, "errors": errors, "numpy": numpy_result.candidate or numpy_result.error}))


main()
