"""Benchmarks on real hardware: `python -m manyranks.bench --help`.

torchrun --nproc-per-node=8 -m manyranks.bench all_reduce -b 8 -e 128M -f 2      # nccl-tests' columns
torchrun --nproc-per-node=8 -m manyranks.bench fsdp --record                     # keep it in results/
python -m manyranks.bench all_reduce --ranks 2                                   # without torchrun
sudo python -m manyranks.bench.two_hosts                                         # two hosts on one machine
"""
