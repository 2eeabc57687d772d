# Generated from chapters/01_why_one_gpu_is_not_enough.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""What training keeps in memory and how long it takes: the ledger by convention and optimizer, activations, FLOPs and days."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from manyranks.runtime import Comm

__all__ = [
    "CONVENTIONS",
    "Convention",
    "Ledger",
    "OPTIMIZERS",
    "QUANTIZED_BLOCK",
    "QUANTIZED_LEAST",
    "STATE_TERMS",
    "Trainer",
    "Transformer",
    "activation_bytes",
    "activation_terms",
    "machine_rates",
    "measured_ledger",
    "optimizer_state",
    "saved_bytes",
    "tensor_bytes",
    "training_flops",
    "training_ledger",
    "training_seconds",
]


@dataclass(frozen=True)
class Convention:
    """Bytes that a training set-up keeps for each parameter, term by term.

    Attributes:
        name: what it is called, in words.
        weight: bytes of the weight that the forward pass uses.
        gradients: bytes of each copy of the gradient, one entry a copy.
        master: bytes of the optimizer's own copy of the weight; 0 if it updates the
            weight itself.
        state: bytes of each number that the optimizer keeps for a parameter (Adam keeps
            two).
    """

    name: str
    weight: int
    gradients: tuple[int, ...]
    master: int
    state: int


CONVENTIONS: dict[str, Convention] = {
    "mixed16": Convention("mixed, 16-bit gradients", 2, (2,), 4, 4),
    "mixed18": Convention("mixed, 32-bit gradients", 2, (4,), 4, 4),
    "mixed20": Convention("mixed, 16- and 32-bit gradients", 2, (2, 4), 4, 4),
    "fp32": Convention("32-bit floats only", 4, (4,), 0, 4),
    "bf16": Convention("bfloat16 only, no master weight", 2, (2,), 0, 2),
}


OPTIMIZERS: tuple[str, ...] = (
    "sgd",
    "momentum",
    "adam",
    "adamw",
    "adafactor",
    "adam8bit",
    "lion",
    "muon",
)
QUANTIZED_BLOCK = 256  # elements that share one scale in bitsandbytes' 8-bit optimizers
QUANTIZED_LEAST = 4096  # elements: smaller tensors stay in 32 bits there


def optimizer_state(
    optimizer: str, shape: tuple[int, ...], name: str = "", element: int = 4
) -> dict[str, int]:
    """The bytes that an optimizer keeps for one parameter tensor, master weight aside.

    Args:
        optimizer: one of `OPTIMIZERS`.
        shape: the tensor's shape.
        name: the tensor's name; Muon leaves those with "embed" or "head" in it to
            AdamW.
        element: bytes of one number of the state. "adam8bit" has widths of its own.

    Returns: bytes by term; empty for plain SGD.

    Sources: PyTorch's implementations for "sgd", "momentum", "adam", "adamw",
    "adafactor" and "muon"; Chen et al. 2023 for "lion"; Dettmers et al. 2022 and
    bitsandbytes' optimizer.py for "adam8bit". The step counters of the last two are
    Python numbers.

    >>> optimizer_state("adamw", (300, 100))
    {'first moment': 120000, 'second moment': 120000, 'step counters': 4}
    >>> optimizer_state("adafactor", (300, 100))
    {'row factors': 1200, 'column factors': 400, 'step counters': 4}
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    if element < 1:
        raise ValueError(f"element must be 1 byte or more, got {element}")
    count = math.prod(shape)
    if optimizer == "sgd":
        return {}
    if optimizer == "muon":
        inside = len(shape) == 2 and "embed" not in name and "head" not in name
        optimizer = "momentum" if inside else "adamw"
    if optimizer in ("momentum", "lion"):
        return {"momentum": count * element}
    if optimizer == "adam8bit":
        if count < QUANTIZED_LEAST:
            return {"first moment": 4 * count, "second moment": 4 * count}
        scales = 2 * 4 * math.ceil(count / QUANTIZED_BLOCK)
        return {"first moment": count, "second moment": count, "block scales": scales}
    if optimizer == "adafactor":
        if len(shape) < 2:
            return {"second moment": count * element, "step counters": 4}
        rows, columns = math.prod(shape[:-1]), math.prod((*shape[:-2], shape[-1]))
        return {
            "row factors": rows * element,
            "column factors": columns * element,
            "step counters": 4,
        }
    return {
        "first moment": count * element,
        "second moment": count * element,
        "step counters": 4,
    }


@dataclass(frozen=True)
class Ledger:
    """What a training job keeps from step to step, in bytes by term; no activations.

    Attributes:
        parameters: how many parameters the model has.
        terms: bytes by term: "weight", "gradient ...", "master weight", and what the
            optimizer keeps.
    """

    parameters: int
    terms: dict[str, float]

    @property
    def weight(self) -> float:
        """Bytes of the weights that the forward pass uses."""
        return self.terms.get("weight", 0)

    @property
    def gradient(self) -> float:
        """Bytes of all copies of the gradient."""
        return sum(size for term, size in self.terms.items() if term.startswith("gradient"))

    @property
    def optimizer(self) -> float:
        """Bytes of the optimizer's state, the master weights included."""
        return self.total - self.weight - self.gradient

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self.terms.values())

    @property
    def per_parameter(self) -> float:
        """Bytes for each parameter."""
        return self.total / self.parameters

    def sharded(self, ranks: int, stage: int = 3) -> "Ledger":
        """What each rank holds if ZeRO shards it (Rajbhandari et al., 2020).

        Args:
            ranks: data-parallel ranks that share it, 1 or more.
            stage: 0 shards nothing (plain data parallelism), 1 the optimizer state, 2
                the gradients too, 3 the weights too.

        Step counters stay whole: each rank has its own.

        >>> training_ledger(7_000_000_000).sharded(8, stage=1).total / 1e9
        38.5
        """
        if ranks < 1:
            raise ValueError(f"ranks must be 1 or more, got {ranks}")
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")

        def share(term: str, size: float) -> float:
            needed = 3 if term == "weight" else 2 if term.startswith("gradient") else 1
            return size / ranks if stage >= needed and term != "step counters" else size

        return replace(self, terms={term: share(term, size) for term, size in self.terms.items()})


def training_ledger(
    parameters: int | Mapping[str, tuple[int, ...]],
    optimizer: str = "adamw",
    convention: str | Convention = "mixed16",
) -> Ledger:
    """The bytes that training a model keeps from step to step, activations aside.

    Args:
        parameters: how many parameters the model has, or the shape of each of its
            tensors by name. "adafactor" and "muon" need the shapes. With a plain number
            the step counters, 4 bytes a tensor, are left out.
        optimizer: one of `OPTIMIZERS`.
        convention: a name in `CONVENTIONS`, or a `Convention`.

    Returns: a `Ledger`.

    >>> ledger = training_ledger(7_000_000_000)
    >>> ledger.total / 1e9, ledger.per_parameter
    (112.0, 16.0)
    >>> training_ledger({"weight": (300, 100), "bias": (300,)}, "momentum", "fp32").terms
    {'weight': 121200, 'gradient (32-bit)': 121200, 'momentum': 121200}
    """
    if isinstance(convention, str):
        if convention not in CONVENTIONS:
            raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}, got {convention!r}")
        convention = CONVENTIONS[convention]
    if isinstance(parameters, Mapping):
        shapes = {name: tuple(shape) for name, shape in parameters.items()}
    else:
        if isinstance(parameters, bool) or parameters != int(parameters) or parameters < 1:
            takes = "a whole number, 1 or more, or shapes by name"
            raise ValueError(f"parameters must be {takes}, got {parameters!r}")
        if optimizer in ("adafactor", "muon"):
            why = "its state depends on them"
            raise ValueError(f"parameters must be shapes by name for {optimizer!r}: {why}")
        shapes = {"": (int(parameters),)}
    count = sum(math.prod(shape) for shape in shapes.values())
    terms: dict[str, float] = {"weight": count * convention.weight}
    for width in convention.gradients:
        terms[f"gradient ({8 * width}-bit)"] = count * width
    if convention.master:
        terms["master weight"] = count * convention.master
    for name, shape in shapes.items():
        for term, size in optimizer_state(optimizer, shape, name, convention.state).items():
            if term != "step counters" or isinstance(parameters, Mapping):
                terms[term] = terms.get(term, 0) + size
    return Ledger(count, terms)


@dataclass(frozen=True)
class Transformer:
    """A GPT-style decoder: MLP of width 4h, biases, output tied to the embedding.

    Attributes:
        layers, hidden, heads: l, h and a.
        vocabulary: V, tokens that it knows.
        positions: learned position embeddings; 0 for a model without.

    >>> gpt3 = Transformer(96, 12288, 96, vocabulary=51200, positions=2048)
    >>> round(gpt3.parameters / 1e9, 1)
    174.6
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int = 0

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "vocabulary"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be 1 or more, got {getattr(self, field)}")
        if self.positions < 0:
            raise ValueError(f"positions must be 0 or more, got {self.positions}")
        if self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden, {self.hidden}, got {self.heads}")

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of one layer's tensors by name: 12·h² + 13·h parameters."""
        h = self.hidden
        shapes: dict[str, tuple[int, ...]] = {}
        for norm, matrices in (
            ("norm1", {"qkv": (3 * h, h), "proj": (h, h)}),
            ("norm2", {"up": (4 * h, h), "down": (h, 4 * h)}),
        ):
            shapes |= {f"{norm}.weight": (h,), f"{norm}.bias": (h,)}
            for name, shape in matrices.items():
                shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by name, as `training_ledger` takes them."""
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocabulary, self.hidden)}
        if self.positions:
            shapes["embed_positions.weight"] = (self.positions, self.hidden)
        for layer in range(self.layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self.layer_shapes().items()}
        return shapes | {"norm.weight": (self.hidden,), "norm.bias": (self.hidden,)}

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return sum(math.prod(shape) for shape in self.layer_shapes().values())

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(math.prod(shape) for shape in self.shapes().values())


class Trainer:
    """A model and its optimizer in the precision of a convention, to be measured.

    Args:
        model: a torch module. It is changed to the convention's precision.
        optimizer: called with a tensor's name and a list that holds the tensor; returns
            its torch optimizer.
        convention: a name in `CONVENTIONS`.

    Call `backward` with a loss, then `step`. `ledger` counts the bytes of what exists
    at that moment. In "mixed18" each 16-bit gradient is freed as soon as it has been
    added to the 32-bit one, in the middle of the backward pass.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Callable[[str, list], Any],
        convention: str = "mixed16",
    ) -> None:
        import torch

        rule = CONVENTIONS[convention]
        self.convention, self.model = convention, model
        masters = (
            {name: p.detach().float().clone() for name, p in model.named_parameters()} if rule.master else {}
        )
        model.to(torch.float32 if rule.weight == 4 else torch.bfloat16)
        self.weights = dict(model.named_parameters())
        self.masters = masters
        self.long_gradients: dict[str, Any] = {}
        self.optimizers = {name: optimizer(name, [masters.get(name, p)]) for name, p in self.weights.items()}
        if convention in ("mixed18", "mixed20"):
            for name, p in self.weights.items():
                p.register_post_accumulate_grad_hook(lambda p, name=name: self._lengthen(name, p))

    def _lengthen(self, name: str, p: Any) -> None:
        import torch

        if name not in self.long_gradients:
            self.long_gradients[name] = torch.zeros_like(p, dtype=torch.float32)
        self.long_gradients[name] += p.grad
        if self.convention == "mixed18":
            p.grad = None

    def backward(self, loss: Any) -> None:
        """Compute the gradients of `loss`, a scalar tensor."""
        loss.backward()

    def step(self) -> None:
        """Let each optimizer step, and renew 16-bit weights from their masters."""
        import torch

        with torch.no_grad():
            for name, p in self.weights.items():
                master = self.masters.get(name)
                if master is not None:
                    master.grad = self.long_gradients[name] if self.long_gradients else p.grad.float()
                self.optimizers[name].step()
                if master is not None:
                    master.grad = None
                    p.copy_(master)

    def ledger(self) -> Ledger:
        """What exists now, term by term."""
        short = [p.grad for p in self.weights.values() if p.grad is not None]
        return measured_ledger(
            self.weights.values(),
            [*short, *self.long_gradients.values()],
            self.masters.values(),
            self.optimizers.values(),
        )


STATE_TERMS = {  # the names that PyTorch's optimizers use in their state
    "exp_avg": "first moment",
    "exp_avg_sq": "second moment",
    "momentum_buffer": "momentum",
    "row_var": "row factors",
    "col_var": "column factors",
    "variance": "second moment",
    "step": "step counters",
}


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of torch tensors, each memory once; of a sharded one, this rank's part.

    >>> import torch
    >>> x = torch.zeros(3, 4)
    >>> tensor_bytes([x, x.t(), torch.zeros(5, dtype=torch.bfloat16)])
    58
    """
    seen: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        size = part.numel() * part.element_size()
        seen[part.data_ptr() if size else 0, size] = size
    return sum(seen.values())


def measured_ledger(
    weights: Iterable[Any],
    gradients: Iterable[Any] = (),
    masters: Iterable[Any] = (),
    optimizers: Iterable[Any] = (),
) -> Ledger:
    """The ledger of tensors that exist, to be held against `training_ledger`.

    Args:
        weights: the model's parameters, torch tensors (of a sharded model, DTensors:
            this rank's part is counted).
        gradients: all gradient tensors that exist.
        masters: master weights, if any.
        optimizers: torch optimizers; all tensors in their state are counted.

    Returns: a `Ledger`; its `parameters` are those of the whole model.
    """
    weights = list(weights)
    terms: dict[str, float] = {"weight": tensor_bytes(weights)}
    by_width: dict[int, list] = {}
    for gradient in gradients:
        by_width.setdefault(gradient.element_size(), []).append(gradient)
    for width, tensors in sorted(by_width.items()):
        terms[f"gradient ({8 * width}-bit)"] = tensor_bytes(tensors)
    if size := tensor_bytes(masters):
        terms["master weight"] = size
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if hasattr(value, "element_size"):
                    term = STATE_TERMS.get(key, key)
                    terms[term] = terms.get(term, 0) + tensor_bytes([value])
    return Ledger(sum(w.numel() for w in weights), terms)


def activation_terms(
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    *,
    attention: str = "stored",
    recompute: str = "none",
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    dropout: bool = True,
    statistic: int = 0,
) -> dict[str, float]:
    """What one GPT layer saves for its backward pass, in bytes by what it is.

    Args:
        sequence, batch, hidden, heads: s, b (of the micro-batch), h and a.
        attention: "stored" keeps the (s, s) matrices of scores; "flash" keeps one
            32-bit number a row in their place.
        recompute: "none", "selective" (the attention between Q, K, V and its result) or
            "full" (the layer's input is all that is kept).
        tensor_parallel: t, over how many ranks the layer's matrices are split.
        sequence_parallel: split the rest of the layer over the same ranks, along the
            sequence.
        dropout: False for a model without: no masks, and no second copy of the scores.
        statistic: bytes of each layer norm's mean and of its 1/σ for a token. The
            published formula leaves them out (0); PyTorch keeps 2 each on a CPU in
            bfloat16, and 4 on a GPU.

    Returns: bytes by term, on each rank. Without the options their sum is s·b·h·(34 +
    5·a·s/h).

    Source: Korthikanti et al. 2022. Activations take 2 bytes an element, masks 1. GELU,
    a as many key and value heads as query heads, an MLP 4·h wide.

    >>> terms = activation_terms(2048, 1, 12288, 96)
    >>> sum(terms.values()) == 2048 * 12288 * (34 + 5 * 96 * 2048 / 12288)
    True
    """
    for name, value in (
        ("sequence", sequence),
        ("batch", batch),
        ("hidden", hidden),
        ("heads", heads),
    ):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    if attention not in ("stored", "flash"):
        raise ValueError(f"attention must be 'stored' or 'flash', got {attention!r}")
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute must be 'none', 'selective' or 'full', got {recompute!r}")
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel must be 1 or more, got {tensor_parallel}")
    sbh, scores = sequence * batch * hidden, heads * sequence**2 * batch
    # what tensor parallelism leaves whole is split only along the sequence
    whole = tensor_parallel if sequence_parallel else 1
    if recompute == "full":
        return {"layer input": 2 * sbh / whole}
    terms = {
        "norm inputs": 4 * sbh / whole,
        "norm outputs": 4 * sbh / whole,
        "Q, K, V": 6 * sbh / tensor_parallel,
        "attention result": 2 * sbh / tensor_parallel,
        "MLP, before GELU": 8 * sbh / tensor_parallel,
        "MLP, after GELU": 8 * sbh / tensor_parallel,
    }
    if dropout:
        terms["dropout masks"] = 2 * sbh / whole
    if statistic:
        terms["norm statistics"] = 4 * statistic * sequence * batch / whole
    if recompute == "none":
        if attention == "flash":
            terms["row sums"] = 4 * heads * sequence * batch / tensor_parallel
        else:
            terms["softmax"] = 2 * scores / tensor_parallel
            if dropout:
                terms["mask of the scores"] = scores / tensor_parallel
                terms["scores after dropout"] = 2 * scores / tensor_parallel
    return terms


def activation_bytes(sequence: int, batch: int, hidden: int, heads: int, **options: Any) -> float:
    """Bytes that one layer saves for its backward pass: the sum of `activation_terms`.

    >>> activation_bytes(2048, 4, 6144, 64) / 1e9
    7.079985152
    >>> activation_bytes(2048, 4, 6144, 64, recompute="full") / 1e9
    0.100663296
    """
    return sum(activation_terms(sequence, batch, hidden, heads, **options).values())


def saved_bytes(
    function: Callable[..., Any], *inputs: Any, parameters: Iterable[Any] = ()
) -> tuple[int, Any]:
    """Run `function(*inputs)` and count what PyTorch saves for the backward pass.

    Args:
        function: a torch module or function.
        inputs: its arguments.
        parameters: tensors not to count; a module's own parameters never are.

    Returns: (bytes, result). Each piece of memory is counted once and whole, however
    many views of it are saved.

    >>> import torch
    >>> x = torch.ones(10, 10, requires_grad=True)
    >>> saved_bytes(lambda x: x.exp().exp(), x)[0]  # each exp saves its result
    800
    """
    import torch

    known = [
        *parameters,
        *(function.parameters() if hasattr(function, "parameters") else ()),
    ]
    leave_out = {p.untyped_storage().data_ptr() for p in known}
    found: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in leave_out:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*inputs)
    return sum(found.values()), result


def training_flops(parameters: float, tokens: float, recompute: bool = False) -> float:
    """Floating-point operations of a training run: 6·N·D, or 8·N·D with recomputation.

    Args:
        parameters: N. Attention's part, which grows with the sequence, is left out.
        tokens: D, all tokens of the run, repetitions counted.
        recompute: whether the backward pass recomputes all activations.

    >>> training_flops(7e9, 2e12)
    8.4e+22
    """
    if parameters <= 0 or tokens <= 0:
        raise ValueError(f"parameters and tokens must be positive, got {parameters} and {tokens}")
    return (8 if recompute else 6) * parameters * tokens


def training_seconds(
    parameters: float,
    tokens: float,
    gpus: int = 1,
    flops: float = 400e12,
    recompute: bool = False,
) -> float:
    """Predicted seconds of a training run on GPUs that share the work perfectly.

    Args:
        parameters, tokens, recompute: as in `training_flops`.
        gpus: how many, 1 or more.
        flops: what each of them achieves, FLOP/s; not its peak.

    >>> round(training_seconds(7e9, 2e12, gpus=1024) / 86400, 1)
    2.4
    """
    if gpus < 1 or flops <= 0:
        raise ValueError(f"gpus must be 1 or more and flops positive, got {gpus} and {flops}")
    return training_flops(parameters, tokens, recompute) / (gpus * flops)


def machine_rates(comm: Comm, x: Any, repeats: int = 3) -> dict[str, float]:
    """Time a matrix product, a copy and a training step on every rank at once.

    Args:
        comm: the communicator.
        x: a square matrix of 32-bit floats, shape (n, n). On a GPU the work is done in
            bfloat16.
        repeats: timed repetitions; the quickest counts.

    Returns: {"flops": FLOP/s of the product, "training": FLOP/s of forward and backward
    passes, counted as 6·N·D, of four layers of (n, n), "copy": bytes read and written
    in a second}, of this rank.
    """
    import torch

    gpu = x.device.type == "cuda"
    a = x.to(torch.bfloat16) if gpu else x
    n, out = x.shape[0], torch.empty_like(a)
    model = torch.nn.Sequential(*(torch.nn.Linear(n, n, bias=False) for _ in range(4))).to(a)
    rows = a.clone().requires_grad_()
    long = torch.zeros(2**24, dtype=torch.float32, device=x.device)
    other = torch.empty_like(long)

    def quickest(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(repeats + 1):
            comm.barrier()
            began = comm.time()
            work()
            if gpu:
                torch.cuda.synchronize()
            times.append(comm.time() - began)
        return min(times[1:])

    return {
        "flops": 2 * n**3 / quickest(lambda: torch.matmul(a, a, out=out)),
        "training": 6 * 4 * n**2 * n / quickest(lambda: model(rows).sum().backward()),
        "copy": 2 * long.nbytes / quickest(lambda: other.copy_(long)),
    }
