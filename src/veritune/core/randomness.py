"""Randomness is addressed, not streamed: every draw is a function of (run seed, step, purpose).

A resumed run therefore needs no saved generator state, and adding a draw for one purpose never shifts another's.
"""

import hashlib


def derive_seed(seed: int, step: int, purpose: str) -> int:
    """The seed, in [0, 2**63), of the one generator that serves `purpose` at `step` of the run with `seed`."""
    digest = hashlib.blake2b(f"{seed}/{step}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
