"""Lab of chapter 2, collectives of your own: a solution. `python solution.py` prints worked numbers."""

import math

import numpy as np

from manyranks import Cluster, simulate
from manyranks.runtime import chunk_bounds


def reduce_scatter_v(comm, x, counts):
    """This rank's counts[rank] elements of the sum of all ranks' vectors; a rank program."""
    _check_counts(comm, counts, len(x))
    n, rank = comm.size, comm.rank
    chunks = np.split(comm.copy(x), np.cumsum(counts)[:-1])
    for k in range(n - 1):
        going = comm.isend(chunks[(rank - k - 1) % n], (rank + 1) % n)
        target = (rank - k - 2) % n
        chunks[target] = chunks[target] + comm.recv((rank - 1) % n)
        going.wait()
    return chunks[rank]


def all_gather_v(comm, part, counts):
    """All ranks' parts, of counts[r] elements each, one after the other; a rank program."""
    _check_counts(comm, counts, sum(counts))
    if len(part) != counts[comm.rank]:
        raise ValueError(f"part must have {counts[comm.rank]} elements, got {len(part)}")
    n, rank = comm.size, comm.rank
    chunks = [part if r == rank else None for r in range(n)]
    for k in range(n - 1):
        going = comm.isend(chunks[(rank - k) % n], (rank + 1) % n)
        chunks[(rank - k - 1) % n] = comm.recv((rank - 1) % n)
        going.wait()
    return np.concatenate(chunks)


def _check_counts(comm, counts, length):
    if len(counts) != comm.size or any(c < 0 for c in counts) or sum(counts) != length:
        raise ValueError(f"counts must be {comm.size} numbers that add up to {length}, got {list(counts)}")


def chain_broadcast(comm, x, src, pieces):
    """Rank src's vector on every rank, passed from rank to rank in pieces; a rank program."""
    n = comm.size
    place = (comm.rank - src) % n  # how far down the chain
    nearer, farther = (comm.rank - 1) % n, (comm.rank + 1) % n
    if place == 0:
        bounds = chunk_bounds(len(x), pieces)
        parts = [x[a:b] for a, b in zip(bounds, bounds[1:])]
    else:
        parts = []
    going = []
    for i in range(pieces):
        if place > 0:
            parts.append(comm.recv(nearer))
        if place < n - 1:
            going.append(comm.isend(parts[i], farther))
    for work in going:
        work.wait()
    return np.concatenate(parts)


def chain_seconds(size, ranks, pieces, alpha, beta):
    """Predicted seconds of a chain broadcast of `size` bytes: the first piece travels, the others follow."""
    if pieces < 1:
        raise ValueError(f"pieces must be 1 or more, got {pieces}")
    if ranks == 1:
        return 0.0
    piece = size / pieces
    return (ranks - 1) * (alpha + piece / beta) + (pieces - 1) * piece / beta


def enough_pieces(size, ranks, alpha, beta, slack):
    """The smallest number of pieces with which the chain takes at most 1 + slack times what it takes with no end of them."""
    if size < 0 or ranks < 1 or alpha < 0 or beta <= 0 or slack <= 0:
        raise ValueError(
            f"sizes must be 0 or more, rates and slack positive, got {(size, ranks, alpha, beta, slack)}"
        )
    limit = (ranks - 1) * alpha + size / beta
    # chain_seconds is limit + size / beta * (ranks - 2) / pieces
    if size == 0 or ranks <= 2:
        return 1
    return max(1, math.ceil(size / beta * (ranks - 2) / (slack * limit)))


def bruck_all_to_all(comm, blocks):
    """Row r of the result is what rank r had for this one; ceil(log2 N) rounds; a rank program."""
    n, rank = comm.size, comm.rank
    mine = np.roll(blocks, -rank, axis=0)  # row i is for the rank i farther on
    bit = 1
    while bit < n:
        rows = [i for i in range(n) if i & bit]
        going = comm.isend(mine[rows], (rank + bit) % n)
        arrived = comm.recv((rank - bit) % n)
        going.wait()
        mine[rows] = arrived
        bit *= 2
    return mine[(rank - np.arange(n)) % n]  # row i came i ranks far


def hierarchical_all_reduce(comm, x, per_node):
    """The sum on every rank, where the last node may have fewer ranks than the others; a rank program."""
    n, rank = comm.size, comm.rank
    if per_node < 1:
        raise ValueError(f"per_node must be 1 or more, got {per_node}")
    nodes = [list(range(a, min(a + per_node, n))) for a in range(0, n, per_node)]
    carriers = min(map(len, nodes))  # as many in each node carry a chunk over the network
    node = nodes[rank // per_node]
    me = rank - node[0]
    bounds = chunk_bounds(len(x), carriers)
    chunks = [x[a:b] for a, b in zip(bounds, bounds[1:])]

    # In the node: chunk c of all is added up on carrier c.
    going = [comm.isend(chunks[c], node[c]) for c in range(carriers) if c != me]
    if me < carriers:
        total = comm.copy(chunks[me])
        for other in node:
            if other != rank:
                total = total + comm.recv(other)
        for work in going:
            work.wait()
        # Across nodes: a ring for each carrier.
        across = comm.group([members[me] for members in nodes])
        total = _ring(across, total)
        going = [comm.isend(total, other) for other in node if other != rank]
    else:
        for work in going:
            work.wait()
        going, total = [], None
    # In the node again: every carrier tells all others.
    done = [total if c == me else comm.recv(node[c]) for c in range(carriers)]
    for work in going:
        work.wait()
    return np.concatenate(done)


def _ring(comm, x):
    bounds = chunk_bounds(len(x), comm.size)
    counts = [b - a for a, b in zip(bounds, bounds[1:])]
    return all_gather_v(comm, reduce_scatter_v(comm, x, counts), counts)


def hierarchical_seconds(size, nodes, per_node, inside, across):
    """Predicted seconds of the chapter's hierarchical all-reduce, on full nodes."""
    (alpha_in, beta_in), (alpha_out, beta_out) = inside, across
    within = 2 * (per_node - 1) * (alpha_in + size / per_node / beta_in)
    between = 2 * (nodes - 1) * (alpha_out + size / per_node / nodes / beta_out)
    return within + between


def main():
    """Worked numbers."""
    counts = [5, 0, 3, 1]
    xs = [np.arange(9) * 10**r for r in range(4)]
    run = simulate(reduce_scatter_v, inputs=xs, counts=counts)
    print("reduce-scatter to", counts, "elements:", [list(map(int, part)) for part in run.results])
    print("  bytes sent by rank:", run.bytes_sent.tolist(), "= 8 bytes times all elements but its own")

    alpha, beta, size = 1e-6, 100e9, 8_000_000
    network = Cluster.flat(8, latency=alpha, bandwidth=beta)
    data = [np.zeros(size // 8)] + [None] * 7
    for pieces in (1, 10, enough_pieces(size, 8, alpha, beta, 0.05)):
        run = simulate(chain_broadcast, inputs=data, cluster=network, src=0, pieces=pieces)
        predicted = chain_seconds(size, 8, pieces, alpha, beta)
        print(
            f"chain broadcast of 8 MB in {pieces:4} pieces: simulated {run.seconds * 1e6:6.1f} us, predicted {predicted * 1e6:6.1f}"
        )

    for n in (5, 8, 13):
        run = simulate(bruck_all_to_all, inputs=[np.arange(n)[:, None] + 100 * r for r in range(n)])
        print(
            f"Bruck's all-to-all on {n:2} ranks: {run.rounds} rounds, ceil(log2 N) = {math.ceil(math.log2(n))}"
        )

    cluster = Cluster(nodes=3, gpus_per_node=4, gpu="H100")
    xs = [np.ones(1_000_000) for _ in range(11)]
    layered = simulate(hierarchical_all_reduce, ranks=11, inputs=xs, cluster=cluster, per_node=4)
    flat = simulate(lambda comm, x: comm.all_reduce(x), ranks=11, inputs=xs, cluster=cluster)
    for name, run in (("flat ring", flat), ("hierarchy", layered)):
        busiest = run.traffic.where(tier=1).sent().max()
        print(
            f"8 MB on nodes of 4, 4 and 3, {name}: simulated {run.seconds * 1e6:.0f} us, busiest card {busiest / 1e6:.2f} MB"
        )
    inside, across = (3.4e-6, 450e9), (14e-6, 50e9)
    print(
        f"chapter's hierarchy, 8 MB on 3 nodes of 4: predicted {hierarchical_seconds(8e6, 3, 4, inside, across) * 1e6:.0f} us"
    )


if __name__ == "__main__":
    main()
