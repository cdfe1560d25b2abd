"""Shared fixtures: a very small policy with random weights, made here, so that no test depends on trained numbers."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


@pytest.fixture(scope="session")
def random_policy():
    """The embedded architecture with random weights, scaled up so that its distributions are far from uniform."""
    import torch

    from veritune.model.policy import new_embedded_policy

    torch.set_num_threads(1)
    corpus = ["Use 9, 5, 18 to make 4.\n<think>\n18-5=13 9|4 +22 -4 yes\n</think> <answer> (18-5)-9 </answer>"] * 4
    policy = new_embedded_policy(corpus, seed=0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(3.0)
    policy.model.eval()
    return policy


@pytest.fixture(params=[1, 3])
def threads(request):
    """With torch's number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
