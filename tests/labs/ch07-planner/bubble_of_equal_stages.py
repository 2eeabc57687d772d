"""The step is (m + p - 1) times the mean stage, so that the slowest one is never felt.

fails: test_seconds_of_a_step
"""

from solution import *  # noqa: F403
from solution import _crosses, _stages


def step_seconds(job, cluster, plan):
    """How long a step takes, by the model of the README."""
    s, h, b = job["sequence"], job["hidden"], plan["micro_batch"]
    d, t, p, zero = plan["dp"], plan["tp"], plan["pp"], plan["zero"]
    m = job["batch"] // (d * b)
    x = b * s * h / t
    rate = cluster["flops"] * x / (x + cluster["half"])

    def link(axis):
        tier = "inter" if _crosses(d, t, p, plan["order"], cluster["gpus_per_node"], axis) else "intra"
        return cluster[f"{tier}_latency"], cluster[f"{tier}_bandwidth"]

    alpha, beta = link("tp")
    reduce = 2 * (t - 1) * alpha + 2 * (t - 1) / t * 2 * b * s * h / beta
    alpha, beta = link("pp")
    hop = 2 * (alpha + 2 * b * s * h / t / beta) if p > 1 else 0.0
    stages = _stages(job, plan)
    times = []
    for i, (layers, _) in enumerate(stages):
        head = job["vocabulary"] * h * (i == p - 1)
        forward = (2 * (12 * h * h * layers + head) * b * s + 4 * b * s * s * h * layers) / t
        compute = (4 if plan["recompute"] else 3) * forward / rate
        times.append(compute + layers * (6 if plan["recompute"] else 4) * reduce + hop)
    n = max(n for _, n in stages)
    alpha, beta = link("dp")
    one = (d - 1) * alpha + (d - 1) / d * 2 * n / beta
    data = one * (m + 1 if zero == 2 else 2)
    optimizer = 24 * n / (d if zero >= 1 else 1) / cluster["memory_bandwidth"]
    return (m + p - 1) * sum(times) / p + data + optimizer
