"""Measurements of sqlalchemy-jobs, of a raw-driver ceiling and of other queues.

    python -m benchmarks              about five minutes
    python -m benchmarks --full       everything in the sizes of the definitions
    python -m benchmarks --list       what each figure means
    python -m benchmarks.profile      where a worker's time goes

Every figure comes from a private PostgreSQL with fsync and synchronous_commit on, which is started
in a temporary directory and removed afterwards. What runs jobs or enqueues them is a program of
its own (``benchmarks/programs``), one a peer, with the same small command line.
"""
