# Generated from chapters/07_3d_parallelism.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Decoders as they are built today: grouped heads, gated MLPs, experts, latent attention; their parameters and activations."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from manyranks.memory import Transformer
from manyranks.runtime.hardware import check_count

__all__ = ["Decoder", "Latent", "MODELS", "as_decoder", "decoder_activation_terms"]


class Latent(NamedTuple):
    """Widths of multi-head latent attention (DeepSeek-AI 2024).

    Queries and keys with values are each compressed by one product and expanded for all
    heads by another. A head's query and key have `plain` entries of their own and
    `rotary` entries that carry the position; the rotary part of the key is one for all
    heads.

    Attributes:
        query, key_value: what queries, and keys with values, are compressed to.
        rotary, plain: entries of a head's query and key, with and without position.
        value: entries of a head's value.
    """

    query: int
    key_value: int
    rotary: int
    plain: int
    value: int


@dataclass(frozen=True)
class Decoder(Transformer):
    """A decoder as they are built today, with experts or without.

    The defaults are Llama's: a gated MLP (SwiGLU), RMS norms, no biases, an output of
    its own, rotary positions. `as_decoder` gives the settings that make it a GPT.

    Attributes:
        ffn: width of the MLP; 0 for 4h.
        kv_heads: heads for keys and values, which groups of query heads share; 0 for as
            many as query heads.
        head_width: entries of a head; 0 for h / a.
        gated: two products up, one of which gates the other.
        tied: whether the output uses the embedding's matrix.
        biases: whether products and norms have biases.
        experts: experts of a layer; 0 for a dense model.
        top_k: experts that a token goes to.
        shared_experts: experts of the same width that every token goes to.
        expert_ffn: width of an expert; 0 for `ffn`.
        dense_layers: so many layers at the start have an MLP and no experts.
        router_bias: a bias for each expert, which only chooses.
        node_limit: the most nodes that a token's experts may be on; 0 for no limit. A
            token then crosses the network once for each of them.
        latent: widths of latent attention, in place of `kv_heads` and `head_width`.

    >>> Decoder(32, 4096, 32, 128256, ffn=14336, kv_heads=8).parameters
    8030261248
    """

    ffn: int = 0
    kv_heads: int = 0
    head_width: int = 0
    gated: bool = True
    tied: bool = False
    biases: bool = False
    experts: int = 0
    top_k: int = 0
    shared_experts: int = 0
    expert_ffn: int = 0
    dense_layers: int = 0
    router_bias: bool = False
    node_limit: int = 0
    latent: Latent | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        usual = {
            "ffn": 4 * self.hidden,
            "kv_heads": self.heads,
            "head_width": self.hidden // self.heads,
        }
        counts = (*usual, "experts", "top_k", "shared_experts", "expert_ffn")
        for name in (*counts, "dense_layers", "node_limit"):
            value = check_count(name, getattr(self, name), 0)
            object.__setattr__(self, name, value or usual.get(name, 0))
        if self.experts and not self.expert_ffn:
            object.__setattr__(self, "expert_ffn", self.ffn)
        if self.latent is not None:
            object.__setattr__(self, "latent", Latent(*self.latent))
            for name, value in self.latent._asdict().items():
                check_count(f"latent {name}", value)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide the {self.heads} heads, got {self.kv_heads}")
        if not self.experts:
            for name in (
                *("top_k", "shared_experts", "expert_ffn", "dense_layers"),
                *("router_bias", "node_limit"),
            ):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} must be 0 for a model without experts, got {getattr(self, name)}"
                    )
        elif not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k must be from 1 to the {self.experts} experts, got {self.top_k}")
        if self.dense_layers > self.layers:
            raise ValueError(
                f"dense_layers must be at most the {self.layers} layers, got {self.dense_layers}"
            )

    @property
    def plain_layers(self) -> int:
        """Layers without experts."""
        return self.dense_layers if self.experts else self.layers

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.plain_layers

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Entries of a token's query, key, value and attention result, all heads."""
        a, d = self.heads, self.head_width
        if self.latent:
            width = a * (self.latent.plain + self.latent.rotary)
            return width, width, a * self.latent.value, a * self.latent.value
        return a * d, self.kv_heads * d, self.kv_heads * d, a * d

    def attention_matrices(self) -> dict[str, tuple[int, int, str]]:
        """(inputs, outputs, cut) of attention's products.

        `cut` says what tensor parallelism divides: "out", "in", or "" for nothing.
        """
        h, (q, k, v, o) = self.hidden, self.widths
        if not self.latent:
            return {"qkv": (h, q + k + v, "out"), "proj": (o, h, "in")}
        c = self.latent
        return {
            "q_down": (h, c.query, ""),
            "q_up": (c.query, q, "out"),
            "kv_down": (h, c.key_value + c.rotary, ""),
            "kv_up": (c.key_value, self.heads * (c.plain + c.value), "out"),
            "proj": (o, h, "in"),
        }

    def mlp_matrices(self, width: int) -> dict[str, tuple[int, int, str]]:
        """(inputs, outputs, cut) of the products of an MLP so wide."""
        up = (1 + self.gated) * width
        return {"up": (self.hidden, up, "out"), "down": (width, self.hidden, "in")}

    def layer_shapes(self, expert: bool = False) -> dict[str, tuple[int, ...]]:
        """The shapes of one layer's tensors by name.

        Args:
            expert: of a layer with experts. All experts' matrices of a kind are one
                tensor, "experts.up.weight" (E, 2f, h).
        """
        h, shapes = self.hidden, {}

        def norm(name: str, width: int) -> None:
            shapes[f"{name}.weight"] = (width,)
            if self.biases:
                shapes[f"{name}.bias"] = (width,)

        def products(matrices: dict, prefix: str = "", count: int = 0) -> None:
            for name, (inputs, outputs, _) in matrices.items():
                many = (count,) if count else ()
                shapes[f"{prefix}{name}.weight"] = (*many, outputs, inputs)
                if self.biases:
                    shapes[f"{prefix}{name}.bias"] = (*many, outputs)

        norm("norm1", h)
        products(self.attention_matrices())
        if self.latent:
            shapes["q_norm.weight"] = (self.latent.query,)
            shapes["kv_norm.weight"] = (self.latent.key_value,)
        norm("norm2", h)
        if not expert:
            products(self.mlp_matrices(self.ffn))
            return shapes
        shapes["router.weight"] = (self.experts, h)
        if self.router_bias:
            shapes["router.bias"] = (self.experts,)
        one = self.mlp_matrices(self.expert_ffn)
        products(one, "experts.", self.experts)
        if self.shared_experts:
            products(self.mlp_matrices(self.shared_experts * self.expert_ffn), "shared.")
        return shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by name, as `training_ledger` takes them."""
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocabulary, self.hidden)}
        if self.positions:
            shapes["embed_positions.weight"] = (self.positions, self.hidden)
        for i in range(self.layers):
            layer = self.layer_shapes(i >= self.plain_layers)
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["norm.weight"] = (self.hidden,)
        if self.biases:
            shapes["norm.bias"] = (self.hidden,)
        if not self.tied:
            shapes["head.weight"] = (self.vocabulary, self.hidden)
        return shapes

    def layer_counts(self, expert: bool = False) -> tuple[int, int, int]:
        """Parameters of one layer: (cut, whole, experts).

        What tensor parallelism divides, what each rank holds, and what the routed
        experts hold, which both tensor and expert parallelism divide.
        """
        cut = whole = experts = 0
        matrices = self.attention_matrices() | self.mlp_matrices(self.ffn)
        for name, shape in self.layer_shapes(expert).items():
            size, piece = math.prod(shape), name.split(".")[-2]
            how = matrices.get(piece, (0, 0, ""))[2]
            if name.startswith("experts."):
                experts += size
            elif how == "out" or (how == "in" and name.endswith("weight")):
                cut += size
            else:
                whole += size
        return cut, whole, experts

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: of the routed experts, `top_k` in each layer."""
        if not self.experts:
            return self.parameters
        idle = self.layer_counts(True)[2] * (self.experts - self.top_k) // self.experts
        return self.parameters - self.expert_layers * idle

    @property
    def product_parameters(self) -> int:
        """Parameters that one token is multiplied with: active, without norms and embeddings."""
        attention = sum(i * o for i, o, _ in self.attention_matrices().values())

        def mlp(width: int) -> int:
            return sum(i * o for i, o, _ in self.mlp_matrices(width).values())

        used = mlp((self.top_k + self.shared_experts) * self.expert_ffn)
        with_experts = attention + used + self.experts * self.hidden
        dense = attention + mlp(self.ffn)
        layers = self.plain_layers * dense + self.expert_layers * with_experts
        return layers + self.vocabulary * self.hidden


@lru_cache(maxsize=256)
def as_decoder(model: Transformer) -> Decoder:
    """The model as a `Decoder`: itself if it is one, else a GPT with the same parameters.

    >>> gpt = Transformer(2, 64, 2, vocabulary=100, positions=16)
    >>> as_decoder(gpt).shapes() == gpt.shapes()
    True
    """
    if isinstance(model, Decoder):
        return model
    return Decoder(
        *(model.layers, model.hidden, model.heads, model.vocabulary, model.positions),
        gated=False,
        tied=True,
        biases=True,
    )


MODELS: dict[str, Decoder] = {
    "llama3-8b": Decoder(32, 4096, 32, 128256, ffn=14336, kv_heads=8),
    "llama3-70b": Decoder(80, 8192, 64, 128256, ffn=28672, kv_heads=8),
    "llama3-405b": Decoder(126, 16384, 128, 128256, ffn=53248, kv_heads=8),
    "mixtral-8x7b": Decoder(*(32, 4096, 32, 32000), ffn=14336, kv_heads=8, experts=8, top_k=2),
    "deepseek-v3": Decoder(
        *(61, 7168, 128, 129280),
        ffn=18432,
        experts=256,
        top_k=8,
        shared_experts=1,
        expert_ffn=2048,
        dense_layers=3,
        router_bias=True,
        node_limit=4,
        latent=Latent(query=1536, key_value=512, rotary=64, plain=128, value=128),
    ),
}
"""Published models by name. Sources: Llama 3 and DeepSeek-V3 papers, Mixtral's config.json."""


def decoder_activation_terms(
    model: Decoder,
    sequence: int,
    *,
    expert: bool = False,
    attention: str = "flash",
    recompute: str = "none",
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    dropout: bool = False,
) -> dict[str, float]:
    """What one layer saves for its backward pass for one sequence, bytes by what it is.

    `manyranks.memory.activation_terms` for a `Decoder`; for a GPT the two are equal.
    Under context parallelism each rank has its part of all terms.

    Args:
        model, sequence: whose layer, and the tokens.
        expert: of a layer with experts. Each token's `top_k` copies are kept as the
            experts' inputs and as their outputs, which the gates' gradients need. All
            experts get equally many.
        attention, recompute, tensor_parallel, sequence_parallel, dropout: as there.
    """
    h, (q, k, v, o) = model.hidden, model.widths
    t, whole = tensor_parallel, tensor_parallel if sequence_parallel else 1
    if recompute == "full":
        return {"layer input": 2 * sequence * h / whole}
    middle = 3 if model.gated else 2  # tensors as wide as the MLP: gate, up, their product

    def mlp(width: int) -> float:
        return 2 * middle * width / t

    each = {
        "norm inputs": 4 * h / whole,
        "norm outputs": 4 * h / whole,
        "Q, K, V": 2 * (q + k + v) / t,
        "attention result": 2 * o / t,
    }
    if model.latent:  # compressed, before and after their norms
        each["latents"] = 4 * (model.latent.query + model.latent.key_value)
    if expert:
        each["router"] = 4 * model.experts / whole
        each["routed"] = 2 * 2 * model.top_k * h
        each["MLP"] = mlp((model.top_k + model.shared_experts) * model.expert_ffn)
    else:
        each["MLP"] = mlp(model.ffn)
    if dropout:
        each["dropout masks"] = 2 * h / whole
    if recompute == "none" and attention == "flash":
        each["row sums"] = 4 * model.heads / t
    elif recompute == "none":
        each["scores"] = (5 if dropout else 2) * model.heads * sequence / t
    return {name: sequence * size for name, size in each.items()}
