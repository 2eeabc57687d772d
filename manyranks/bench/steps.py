"""Training steps under PyTorch's own parallelism: a tensor-parallel stack, DDP, FSDP2 and a pipeline.

All four train the same stack of transformer blocks on random inputs, so that their times can be compared. What is
counted as FLOPs is what `block_flops` says: the matrix products of the model, 2 FLOPs for a multiplication and an
addition, the backward pass twice the forward pass, attention in full although it is causal. No layer norm, no GELU, no
optimizer, no recomputation: these are model FLOPs, and their rate over a device's peak is MFU. Every bench checks its
result against the model on one rank, or the replicas against each other, before it times anything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from manyranks.bench.site import BenchError, Site
from manyranks.runtime import human_bytes

__all__ = ["block_flops", "ddp", "fsdp", "pipeline", "tensor_parallel"]


def block_flops(tokens: float, sequence: int, hidden: int) -> float:
    """FLOPs of one block's forward and backward pass: 3 x (24 T h^2 + 4 T s h).

    A block has 12 h^2 weights in matrices, 2 FLOPs each for a token; the scores and the weighted sum of attention take
    2 s h each.

    >>> block_flops(tokens=1, sequence=4, hidden=8)
    4992
    """
    return 3 * (24 * tokens * hidden**2 + 4 * tokens * sequence * hidden)


def make_stack(hidden: int, heads: int, layers: int, dtype: Any, device: Any, seed: int = 0) -> Any:
    """A stack of pre-norm transformer blocks, the same on all ranks. Module list under ``blocks``."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
            self.out = nn.Linear(hidden, hidden)

        def forward(self, x: Any) -> Any:  # (b, s, h)
            b, s, _ = x.shape
            q, k, v = (f(x).view(b, s, -1, hidden // heads).transpose(1, 2) for f in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (b, heads/t, s, h/heads)
            return self.out(y.transpose(1, 2).reshape(b, s, -1))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x: Any) -> Any:
            return self.down(F.gelu(self.up(x)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.attention, self.mlp = Attention(), MLP()

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(layers))).to(device=device, dtype=dtype)


class Task:
    """The model, a batch and what they cost, from the options; sizes differ with the device unless given."""

    def __init__(self, site: Site, options: dict[str, Any], layers: int):
        import torch

        gpu = site.device.type == "cuda"
        usual = {"hidden": 4096 if gpu else 256, "sequence": 2048 if gpu else 128, "batch": 4 if gpu else 2}
        for key, value in usual.items():
            setattr(self, key, options[key] or value)
        self.layers = options["layers"] or layers
        self.heads = options["heads"] or max(1, self.hidden // 64)
        if self.hidden % self.heads:
            raise BenchError(f"--heads must divide --hidden {self.hidden}, got {self.heads}")
        name = options["step_dtype"] or ("bfloat16" if gpu else "float32")
        self.dtype, self.site, self.options = getattr(torch, name), site, options
        self.tokens = self.batch * self.sequence
        self.shape = {"hidden": self.hidden, "heads": self.heads, "layers": self.layers, "sequence": self.sequence,
                      "batch": self.batch, "dtype": name, "threads": torch.get_num_threads()}  # fmt: skip

    def model(self) -> Any:
        return make_stack(self.hidden, self.heads, self.layers, self.dtype, self.site.device)

    def batch_of(self, seed: int, batch: int | None = None) -> tuple[Any, Any]:
        """Inputs and targets, (b, s, h) each."""
        import torch

        generator = torch.Generator().manual_seed(1000 + seed)
        shape = (2, batch or self.batch, self.sequence, self.hidden)
        both = torch.randn(shape, generator=generator).to(self.site.device, self.dtype)
        return both[0], both[1]

    def describe(self, title: str, parameters: int) -> None:
        self.site.header()
        self.site.say(
            f"# {title}: {self.layers} block{'s' * (self.layers != 1)}, h = {self.hidden}, {self.heads} heads, "
            f"s = {self.sequence}, batch {self.batch}, {self.shape['dtype']}, {parameters:,} parameters"
        )
        self.site.say(
            "# FLOPs counted: the model's matrix products, forward and twice that backward; see --help"
        )

    def seconds(self, work: Callable[[], Any]) -> float:
        """Of the slowest rank: a step is over when all have done it."""
        return max(self.site.time(work, self.options["iterations"], self.options["warmup"]))

    def report(self, label: str, seconds: float, tokens: float, **more: Any) -> dict[str, Any]:
        """One line: a step's time, tokens per second of the whole run, FLOP/s achieved by each rank."""
        flops = self.layers * block_flops(tokens, self.sequence, self.hidden)
        row = {"label": label, "seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds,
               "flops": flops, "flops_per_second_per_rank": flops / seconds / self.site.size, **more}  # fmt: skip
        rate = row["flops_per_second_per_rank"]
        unit, scale = ("TFLOP/s", 1e12) if rate >= 1e11 else ("GFLOP/s", 1e9)
        self.site.say(
            f"  {label:28}{seconds * 1e3:>11.2f}{row['tokens_per_second']:>13,.0f}   {rate / scale:9.2f} {unit}"
        )
        return row

    def columns(self) -> None:
        self.site.say(f"# {'step':28}{'time (ms)':>11}{'tokens/s':>13}   achieved by each rank")

    def tolerance(self) -> float:
        return 1e-4 if self.dtype.itemsize >= 4 else 5e-2

    def check(self, what: str, difference: float, allowed: float) -> dict[str, Any]:
        """The worst rank's difference, said and kept."""
        worst = max(self.site.gather(float(difference)))
        ok = worst <= allowed  # False for NaN too
        self.site.say(f"# check: {what}: relative difference {worst:.1e} {'OK' if ok else 'FAILED'}")
        return {"what": what, "difference": worst, "allowed": allowed, "ok": ok}

    def found(self, rows: list[dict[str, Any]], check: dict[str, Any], **more: Any) -> dict[str, Any]:
        options = {key: self.options[key] for key in ("iterations", "warmup")}
        return {
            "shape": self.shape,
            "rows": rows,
            "check": check,
            "wrong": int(not check["ok"]),
            **options,
            **more,
        }


def _difference(a: Any, b: Any) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def _loss(y: Any, target: Any) -> Any:
    return (y - target).float().pow(2).mean()


def _all_reduce_seconds(task: Task, elements: int, times: int = 1) -> float:
    import torch
    import torch.distributed as dist

    buffer = torch.zeros(elements, dtype=task.dtype, device=task.site.device)
    return task.seconds(lambda: [dist.all_reduce(buffer) for _ in range(times)])


def tensor_parallel(site: Site, options: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward of a stack whose matrices are split over all ranks, column then row (DTensor)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    task = Task(site, options, layers=1)
    if task.heads % site.size:
        raise BenchError(
            f"tensor_parallel needs heads that the {site.size} ranks divide, got {task.heads}: set --heads"
        )
    model, (x, target) = task.model(), task.batch_of(0)
    task.describe("tensor parallel over all ranks", sum(p.numel() for p in model.parameters()))
    whole = model(x).detach()
    mesh = init_device_mesh(site.device.type, (site.size,))
    # One DTensor for q, k and v, so that the backward pass sums their three gradients before the one all-reduce.
    shared = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    plan = {"attention": shared, "mlp": shared, "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.out": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh, plan)
    check = task.check("output against the whole model", _difference(model(x), whole), task.tolerance())
    x.requires_grad_()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        _loss(model(x), target).backward()

    task.columns()
    rows = [task.report("forward and backward", task.seconds(step), task.tokens)]
    reductions = 4 * task.layers
    alone = _all_reduce_seconds(task, x.numel(), reductions)
    size = x.numel() * task.dtype.itemsize
    site.say(f"# its {reductions} all-reduces of {human_bytes(size)} alone: {alone * 1e3:.2f} ms")
    return task.found(rows, check, all_reduces=reductions, all_reduce_bytes=size, all_reduces_seconds=alone)


def ddp(site: Site, options: dict[str, Any]) -> dict[str, Any]:
    """A DistributedDataParallel step with SGD, the same without the all-reduce, and the all-reduce alone."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    task = Task(site, options, layers=4)
    model, (x, target) = task.model(), task.batch_of(site.rank)
    parameters = sum(p.numel() for p in model.parameters())
    task.describe("DistributedDataParallel, batch of each rank", parameters)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        _loss(wrapped(x), target).backward()
        optimizer.step()

    def alone() -> None:
        with wrapped.no_sync():
            step()

    step()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = site.comm.broadcast(mine, src=0) if site.size > 1 else mine
    check = task.check("replicas against rank 0's after a step", _difference(mine, first), 0.0)
    task.columns()
    everything = task.tokens * site.size
    rows = [
        task.report("step", task.seconds(step), everything),
        task.report("step without all-reduce", task.seconds(alone), everything),
    ]
    seconds = _all_reduce_seconds(task, parameters)
    size = parameters * task.dtype.itemsize
    site.say(f"# the gradient's all-reduce alone, {human_bytes(size)} at once: {seconds * 1e3:.2f} ms")
    hidden = rows[1]["seconds"] + seconds - rows[0]["seconds"]
    if site.size > 1:
        site.say(f"# hidden behind computing: {max(0.0, min(1.0, hidden / seconds)):.0%} of it")
    return task.found(rows, check, parameters=parameters, all_reduce_bytes=size, all_reduce_seconds=seconds)


def fsdp(site: Site, options: dict[str, Any]) -> dict[str, Any]:
    """A fully_shard (FSDP2) step with SGD, each block its own unit, and what a rank holds between steps."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    task = Task(site, options, layers=4)
    model, (x, target) = task.model(), task.batch_of(site.rank)
    parameters = sum(p.numel() for p in model.parameters())
    task.describe("FSDP2 (fully_shard), batch of each rank", parameters)
    dense = copy.deepcopy(model[0])
    _loss(dense(x), target).backward()
    gradient = dense.mlp.up.weight.grad
    expected = site.comm.all_reduce(gradient, op="mean") if site.size > 1 else gradient
    del dense

    mesh = init_device_mesh(site.device.type, (site.size,))
    probe = fully_shard(copy.deepcopy(model[0]), mesh=mesh)
    _loss(probe(x), target).backward()
    got = probe.mlp.up.weight.grad.full_tensor()
    check = task.check(
        "a block's gradient against the whole one's", _difference(got, expected), task.tolerance()
    )
    del probe, got, expected

    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        _loss(model(x), target).backward()
        optimizer.step()

    task.columns()
    rows = [task.report("step", task.seconds(step), task.tokens * site.size)]
    held = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    whole = parameters * task.dtype.itemsize
    site.say(f"# weights held by rank 0: {human_bytes(held)} of {human_bytes(whole)}")
    return task.found(rows, check, parameters=parameters, held_bytes=held, whole_bytes=whole)


def pipeline(site: Site, options: dict[str, Any]) -> dict[str, Any]:
    """Steps of a pipeline over all ranks, GPipe and 1F1B, for several numbers of micro-batches of one batch."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    task = Task(site, {**options, "batch": options["batch"] or 8}, layers=max(4, 2 * site.size))
    if task.layers % site.size:
        raise BenchError(
            f"pipeline needs layers that the {site.size} ranks divide, got {task.layers}: set --layers"
        )
    micro_batches = options["micro_batches"]
    for m in micro_batches:
        if task.batch % m:
            raise BenchError(f"--micro-batches must divide --batch {task.batch}, got {m}")
    model, (x, target) = task.model(), task.batch_of(0)
    task.describe(f"pipeline of {site.size} stages", sum(p.numel() for p in model.parameters()))
    per = task.layers // site.size
    mine = model[site.rank * per : (site.rank + 1) * per]
    last = site.rank == site.size - 1
    expected = _loss(model(x), target).detach() if last else None
    rows, check = [], None
    for kind, schedule_of in (("GPipe", ScheduleGPipe), ("1F1B", Schedule1F1B)):
        for m in micro_batches:
            if kind == "1F1B" and m < site.size:
                continue  # PyTorch's 1F1B wants a micro-batch for every stage
            stage = PipelineStage(mine, site.rank, site.size, site.device)
            schedule = schedule_of(stage, n_microbatches=m, loss_fn=_loss)

            def step(schedule: Any = schedule) -> list[Any]:
                for p in mine.parameters():
                    p.grad = None
                losses: list[Any] = []
                given = (x,) if site.rank == 0 else ()
                if last:
                    schedule.step(*given, target=target, losses=losses)
                else:
                    schedule.step(*given)
                return losses

            losses = step()
            if check is None:
                off = _difference(sum(losses) / len(losses), expected) if last else 0.0
                check = task.check("loss against the model on one rank", off, task.tolerance())
                task.columns()
            idle = (site.size - 1) / (m + site.size - 1)
            row = task.report(f"{kind}, {m} micro-batches", task.seconds(step), task.tokens, schedule=kind)
            rows.append({**row, "micro_batches": m, "predicted_idle": idle})
    if not rows:
        raise BenchError("--micro-batches holds nothing to run")
    for m in micro_batches:
        idle = (site.size - 1) / (m + site.size - 1)
        site.say(f"# predicted idle fraction of the makespan, {m} micro-batches: {idle:.1%}")
    return task.found(rows, check)
