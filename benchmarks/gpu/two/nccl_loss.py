"""Two GPUs of one machine: can a survivor of a lost rank go on in its own process under NCCL?

NOT RUN YET by anybody of this project. It answers four questions:

    leaks       fifty groups one after the other: does the device's memory come back after destroy_process_group()?
    abort       rank 1 is killed while rank 0 waits in an all-reduce: how long does _abort_process_group() take from another
                thread, and does the wait end?
    garbage     does the aborted all-reduce return without an error, and what does it leave in its buffer? (Expected: it
                returns, and the sum is wrong: whoever goes on must look whether the group was cut.)
    alive       can the same process form a new group and sum in it?

Expected: free memory the same from the second group on; an abort within a second; "alive 1.0" last. A process that hangs for a
minute, or ends by the watchdog, says no.

    python benchmarks/gpu/two/nccl_loss.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

GROUPS, PORT, KILLED, WAIT_S = 50, 29511, 1, 5.0
NUMBERS = 2**26


def main() -> None:
    """Start both ranks, or be one of them."""
    if "RANK" in os.environ:
        rank(int(os.environ["RANK"]))
        return
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    ranks = [
        subprocess.Popen([sys.executable, __file__], env=os.environ | shared | {"RANK": str(number)})
        for number in range(2)
    ]
    try:
        print("rank 0 ended with status", ranks[0].wait(300))
    finally:
        for process in ranks:
            process.kill()


def rank(number: int) -> None:
    """Groups, then the loss of rank 1."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(number)
    numbers = torch.ones(NUMBERS, device="cuda")
    for count in range(GROUPS):
        os.environ["MASTER_PORT"] = str(PORT + count)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        numbers.fill_(1.0)
        dist.all_reduce(numbers)
        torch.cuda.synchronize()
        if count < GROUPS - 1:
            dist.destroy_process_group()
        print(f"rank {number}: group {count}: {torch.cuda.mem_get_info()[0] >> 20} MiB free", flush=True)
    if number == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)

    def cut() -> None:
        time.sleep(WAIT_S)  # until the all-reduce below surely waits for the dead rank
        begin = time.monotonic()
        dist.distributed_c10d._abort_process_group()
        print(f"abort took {time.monotonic() - begin:.2f} s", flush=True)

    cutter = threading.Thread(target=cut)
    cutter.start()
    begin = time.monotonic()
    numbers.fill_(1.0)
    dist.all_reduce(numbers)
    print(f"the all-reduce returned {numbers[0].item()} after {time.monotonic() - begin:.1f} s", flush=True)
    cutter.join()
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT=str(PORT + GROUPS))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    numbers.fill_(1.0)
    dist.all_reduce(numbers)
    print("alive", numbers[0].item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
