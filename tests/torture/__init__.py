"""Malformed input by the thousand: each module is a command that counts, and fails when a promise is broken.

    python -m tests.torture.recipes --count 5000 --seed 1
    python -m tests.torture.files --count 2000 --seed 1
    python -m tests.torture.bitflips --count 1000 --seed 1

The promises: an error for users is one printable line with an exit code of the contract, in a second of processor time.
"""
