"""Events as a run writes them, for tests of what reads them."""

from springtide.events import StepDone


def step(number: int, loss: float = 1.0, sources: tuple[str, ...] = ()) -> StepDone:
    return StepDone(
        extra={
            **{f"loss/{name}": loss + place for place, name in enumerate(sources)},
            **{f"step_tokens/{name}": 10.0 // len(sources) for name in sources},
            **{f"epochs/{name}": number / 4 for name in sources},
        },
        step=number,
        loss=loss,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=number * 10,
        step_tokens=10,
        step_time_s=0.5,
        data_wait_s=0.1,
        tokens_per_s=20.0,
        mfu=0.5,
        memory_bytes=1,
        world_size=2,
        digest="00",
    )
