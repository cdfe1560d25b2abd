"""A model's shape, counted on its modules without any weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from veritune.core.errors import ConfigError
from veritune.model.policy import attends_to_all, load_skeleton

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    """What memory and time are counted from; widths in elements."""

    model_type: str
    parameters: int
    tensors: int
    """Parameter tensors."""
    layers: int
    hidden: int
    heads: int
    query: int
    """Width of a token's queries: heads times head size."""
    key_value: int
    """Width of a token's keys, and of its values."""
    feed_forward: int
    head_norms: bool
    """Whether queries and keys are normalised for each head."""
    layer_matrices: int
    """Elements of all layers' matrices."""
    vocabulary: int
    context: int

    @property
    def head_matrix(self) -> int:
        """Elements of the matrix from hidden states to logits."""
        return self.vocabulary * self.hidden

    @property
    def key_value_heads(self) -> int:
        return self.key_value * self.heads // self.query

    def cache_bytes(self, itemsize: int) -> int:
        """Bytes that a token's keys and values take in every layer."""
        return 2 * self.layers * self.key_value * itemsize


def shape_of(name: str) -> Shape:
    """The shape of "embedded", a folder or a hub id, counted on its modules without any weight.

    Raises ConfigError, naming `model`, where there is none or its layers are of another kind than Llama's.
    """
    model = load_skeleton(name)
    config, head = model.config, model.get_output_embeddings()
    layers = [_layer_widths(layer) for layer in getattr(model.base_model, "layers", ())]
    if head is None or not layers or any(layer is None or layer != layers[0] for layer in layers):
        raise ConfigError(
            f"model is {name!r} of type {config.model_type!r}; its layers must be alike, with the projections q, k, "
            "v, o, gate, up and down and two norms, as those of Llama, Mistral, Qwen2 and Qwen3 are"
        )
    if not attends_to_all(config):
        raise ConfigError(f"model is {name!r}, whose attention is not full in all layers, as training needs it to be")
    widths = layers[0]
    assert widths is not None
    matrices = [module.weight for module in model.base_model.layers.modules() if isinstance(module, torch.nn.Linear)]
    vocabulary, hidden = head.weight.shape
    return Shape(
        model_type=config.model_type,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tensors=len(list(model.parameters())),
        layers=len(layers),
        hidden=hidden,
        heads=config.num_attention_heads,
        query=widths["q_proj"],
        key_value=widths["k_proj"],
        feed_forward=widths["gate_proj"],
        head_norms="q_norm" in widths,
        layer_matrices=sum(matrix.numel() for matrix in matrices),
        vocabulary=vocabulary,
        context=int(getattr(config, "max_position_embeddings", 1 << 30)),
    )


def _layer_widths(layer: torch.nn.Module) -> dict[str, int] | None:
    """The output width of everything in a layer that has weights, by name; None for what is not counted here."""
    weighed = {
        path.rpartition(".")[2]: module
        for path, module in layer.named_modules()
        if module._parameters.get("weight") is not None
    }
    norms = set(weighed) - {*PROJECTIONS, "q_norm", "k_norm"}
    if not set(PROJECTIONS) <= set(weighed) or len(norms) != 2:
        return None
    return {name: module.weight.shape[0] for name, module in weighed.items()}
