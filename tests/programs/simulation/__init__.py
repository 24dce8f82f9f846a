"""The control plane of a run in one process and in simulated time.

Real: the order, ``decide`` and the policies that use it, the pool of worker processes, leases, commits, retention, restore, the
journal, ``train``, ``verify``. Simulated: time, processes, the store, Ray, the arithmetic of a step.

One seed has one history: its digest is the same on every machine, however busy, and with every PYTHONHASHSEED.

    clock.py       time and processes: who runs when
    outside.py     what must not reach a schedule: real time, threads, processes, folders, random numbers
    store.py       an object store with outages, and who wrote what
    cluster.py     nodes, notices, snapshot servers
    group.py       a worker group: restore, steps, saves
    driver.py      a driver with its controller
    faults.py      what goes wrong, and when: a function of one integer
    check.py       what must hold whatever goes wrong
    defects.py     what was mended, to plant back
    play.py        all of it, from one integer
    __main__.py    many seeds; or one again: python -m simulation SEED
"""
