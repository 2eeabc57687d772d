"""The next copy goes to the expert with the largest load, however many copies share it already.

fails: test_replicas
"""

CHANGES = [
    (
        "max(open_ones, key=lambda e: loads[e] / copies[e])",
        "max(open_ones, key=lambda e: loads[e])",
    ),
]
