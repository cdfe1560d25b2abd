"""FSDP2 around the packed forward pass: two processes that hold half of each weight have one process's gradient."""

import os
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from veritune.model.decoder_layer import packed_layer
from veritune.model.head import packed_log_probs, response_log_probs
from veritune.model.packing import pack_rows
from veritune.model.policy import ATTENTION, checkpoint_activations

PROMPTS, RESPONSES = [[3, 1, 4], [3, 1, 4], [9, 2]], [[8, 9, 7], [9], [3, 2, 3, 8]]
SHARES = [[0, 1], [2]]
CASES = [(tied, frozen, reshard) for tied in (True, False) for frozen in (True, False) for reshard in (True, False)]


def make_model(tied, frozen, checkpointing):
    torch.manual_seed(0)
    shape = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **heads, tie_word_embeddings=tied)).train()
    model.set_attn_implementation(ATTENTION)
    if checkpointing:
        checkpoint_activations(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "norm" in name or "bias" in name)
    return model


def shard(model, reshard):
    for layer in model.base_model.layers:
        layer.packed_layer = types.MethodType(packed_layer, layer)
        fully_shard(layer, reshard_after_forward=reshard)
        register_fsdp_forward_method(layer, "packed_layer")
    model.packed_log_probs = types.MethodType(packed_log_probs, model)
    fully_shard(model)
    register_fsdp_forward_method(model, "packed_log_probs")
    for module in (model, *model.base_model.layers):  # sums over processes: a loss has its denominators already
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def add_gradient(model, rows):
    packed = pack_rows([PROMPTS[row] for row in rows], [RESPONSES[row] for row in rows], torch.device("cpu"))
    (-response_log_probs(model, packed, 0.8).sum() / 8).backward()


def worst_differences(rank, store, results):
    torch.set_num_threads(1)
    # Loopback: the machine's own name may lead nowhere.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    worst = []
    for tied, frozen, reshard in CASES:
        alone, sharded = (make_model(tied, frozen, checkpointing) for checkpointing in (False, reshard))
        shard(sharded, reshard)
        for _ in range(2):  # the second pass adds to the first one's gradient
            for rows in SHARES:
                add_gradient(alone, rows)
            add_gradient(sharded, SHARES[rank])
        for one, half in zip(alone.parameters(), sharded.parameters(), strict=True):
            assert (one.grad is None) == (half.grad is None) == (not one.requires_grad)
            if one.grad is not None:
                assert isinstance(half.grad, DTensor) and one.grad.norm() > 0
                worst.append(((half.grad.full_tensor() - one.grad).norm() / one.grad.norm()).item())
    if rank == 0:
        results.put(max(worst))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_two_processes_have_the_gradient_of_one(tmp_path):
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(worst_differences, (str(tmp_path / "store"), results), nprocs=2)
    assert results.get() < 1e-5
