"""Pipelines are sent around like rings: the last stage also sends to the first.

fails: test_bytes_on_each_tier
"""

from solution import *  # noqa: F403
from solution import groups


def tier_bytes(sizes, order, gpus_per_node, ring, chain):
    """Bytes that stay in a node, bytes that leave one, and the most that a single rank sends across."""
    intra, across = 0, {}
    for axes, closed in ((ring, True), (chain, False)):
        for axis, size in axes.items():
            for members in groups(sizes, order, [axis]):
                edges = list(zip(members, members[1:]))
                edges += [(members[-1], members[0])] * (len(members) > 1)
                if not closed:
                    edges += [(b, a) for a, b in edges]
                for a, b in edges:
                    if a // gpus_per_node == b // gpus_per_node:
                        intra += size
                    else:
                        across[a] = across.get(a, 0) + size
    return {"intra": intra, "inter": sum(across.values()), "port": max(across.values(), default=0)}
