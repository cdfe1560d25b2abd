"""Graders with faults, for the pool to survive."""

import os
import time
from pathlib import Path

from veritune.core.types import Score


def faulty(response: str, ground_truth: str) -> Score:
    """Does what the response says, else compares strings."""
    if response == "sleep":
        time.sleep(60)
    if response == "spin":
        while True:
            pass
    if response == "one long C call":
        return Score(float(9**9**9 > 0), 1.0, 1.0)
    if response == "memory":
        return Score(float(len(bytearray(1 << 40))), 1.0, 1.0)
    if response == "die":
        os._exit(3)
    if response == "raise":
        raise ValueError("a fault")
    if response == "print":
        print("noise", flush=True)
    if response.startswith("die once "):
        marker = response.removeprefix("die once ")
        if not os.path.exists(marker):
            with open(marker, "w"):
                pass
            os._exit(3)
    correct = float(response == ground_truth or response in ("print",) or response.startswith("die once"))
    return Score(correct, 1.0, correct, response, "string")


def meet(response: str, ground_truth: str) -> Score:
    """Waits for the others: full marks where `response` gradings are under way at once in the folder `ground_truth`."""
    Path(ground_truth, str(os.getpid())).touch()
    while len(os.listdir(ground_truth)) < int(response):
        time.sleep(0.01)
    return Score(1.0, 1.0, 1.0)


def deliberate(response: str, ground_truth: str) -> float:
    """Takes longer than a pool likes, and leaves its process's number."""
    Path(ground_truth, str(os.getpid())).touch()
    time.sleep(0.2)
    return 1.0
