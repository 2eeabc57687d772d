"""The window says how far back a rank reads; that a document may begin in between is left to the mask.

fails: test_needed_rows, test_forward_moves_only_what_is_read, test_backward_comes_home_along_the_ring, test_ring_bytes
"""

CHANGES = [
    (
        "low = int(begins[first])  # later queries read nothing that is further back",
        "low = 0",
    ),
]
