"""Operations and kernels by what they are bound by. The names are those of H100s' and A100s' traces."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stepping import done_step
from torch.autograd import DeviceType

from springtide.distributed import alone
from springtide.events import Profiled, Warned
from springtide.storage import Folder
from springtide.training.profile import Profile, kernel_shares, kernels_of, kind_of, shares, times_by_name


def test_each_kind_has_its_share_and_they_add_up_to_one() -> None:
    times = {"aten::addmm": 3.0, "aten::mul": 1.0, "c10d::allreduce_": 2.0, "ncclDevKernel_AllGather": 1.0}
    found = shares(times, wall_s=10.0, input_s=1.5)
    assert found == pytest.approx(
        {"arithmetic": 0.3, "memory": 0.1, "communication": 0.3, "input": 0.15, "waiting": 0.15}
    )


def test_what_runs_at_once_is_no_more_than_all() -> None:
    found = shares({"flash_fwd_kernel": 8.0, "nccl": 8.0}, wall_s=10.0, input_s=0.0)
    assert found["arithmetic"] == found["communication"] == 0.5
    assert found["waiting"] == 0.0


NVJET = "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT"
AMPERE = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn"
XMMA = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas"
CUTLASS = "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(Params)"
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>"
)
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128_4x1x1_kernel0_0"
EFFICIENT = (
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)"
)
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>"
FUSED = "triton_poi_fused__scaled_dot_product_flash_attention_convert_element_type_mm_3"
TEMPLATE = "triton_tem_fused_mm_t_12"
COPY = "Memcpy HtoD (Pinned -> Device)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
KINDS = {
    "arithmetic": [NVJET, AMPERE, XMMA, CUTLASS, FLASH, CUDNN, EFFICIENT, TEMPLATE],
    "memory": [ELEMENTWISE, ADAM, FUSED, COPY],
    "communication": [GATHER, SCATTER],
}


@pytest.mark.parametrize(("kind", "kernel"), [(kind, kernel) for kind, names in KINDS.items() for kernel in names])
def test_a_kernel_is_known_by_its_name(kind: str, kernel: str) -> None:
    assert kind_of(kernel) == kind


def trace(*kernels: tuple[str, float, float]) -> list[Any]:
    """The profiler's events of kernels (name, begin, end [ms]): the operator that launched each, with its kernel's time, the
    annotation around all of them on both sides, and the kernels."""

    def one(name: str, device: DeviceType, begin_ms: float, end_ms: float, annotation: bool = False) -> SimpleNamespace:
        span = SimpleNamespace(start=begin_ms * 1e3, end=end_ms * 1e3)
        return SimpleNamespace(name=name, device_type=device, time_range=span, is_user_annotation=annotation)

    end_ms = max(end_ms for _, _, end_ms in kernels)
    found = [one("FSDP::pre_forward", device, 0, end_ms, True) for device in (DeviceType.CPU, DeviceType.CUDA)]
    for name, begin_ms, end_ms in kernels:
        found.append(one("aten::mm", DeviceType.CPU, begin_ms, end_ms))
        found.append(one(name, DeviceType.CUDA, begin_ms, end_ms))
    return found


TRACES = {
    # both networks and copies behind products: nothing of them is exposed but 1 ms
    "arithmetic": ([(NVJET, 0, 6), (CUDNN, 6, 8), (GATHER, 1, 8), (SCATTER, 7, 9), (COPY, 2, 3), (ADAM, 9, 10)], 10, 0),
    # a gather that the products wait for
    "communication": ([(NVJET, 0, 2), (GATHER, 1, 7), (SCATTER, 6, 9), (ELEMENTWISE, 9, 10)], 10, 0),
    "memory": ([(XMMA, 0, 2), (FUSED, 2, 5), (ELEMENTWISE, 4, 7), (ADAM, 7, 9), (GATHER, 0, 9)], 10, 0),
    "input": ([(NVJET, 6, 9), (ADAM, 9, 10)], 10, 5.5),
    "waiting": ([(NVJET, 0, 1), (NVJET, 4, 5), (ELEMENTWISE, 8, 9)], 10, 1),
}


@pytest.mark.parametrize("bound", TRACES)
def test_the_verdict_of_a_trace_is_its_bottleneck(bound: str) -> None:
    """The verdict of a trace is what its device is bound by."""
    kernels, wall_ms, input_ms = TRACES[bound]
    found = kernel_shares(kernels_of(trace(*kernels)), wall_ms / 1e3, input_ms / 1e3)
    assert sum(found.values()) == pytest.approx(1.0)
    assert max(found, key=lambda kind: found[kind]) == bound


def test_each_moment_is_counted_once_and_communication_where_nothing_hides_it() -> None:
    kernels = kernels_of(trace(*TRACES["communication"][0]))
    expected = {"arithmetic": 0.2, "memory": 0.1, "communication": 0.7, "input": 0.0, "waiting": 0.0}
    assert kernel_shares(kernels, 0.010, 0.0) == pytest.approx(expected)
    assert times_by_name(kernels) == pytest.approx({NVJET: 0.002, GATHER: 0.006, SCATTER: 0.003, ELEMENTWISE: 0.001})
    empty = kernel_shares([], 0.010, 0.004)
    assert (empty["input"], empty["waiting"]) == pytest.approx((0.4, 0.6))


def after(profile: Profile, step: int) -> list[Any]:
    return list(profile.after_step(done_step(step)))


@pytest.mark.parametrize("goes_on", [True, False], ids=["steps follow", "the last step"])
def test_no_step_waits_for_a_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, goes_on: bool
) -> None:
    """No step waits for a trace and one that cannot be written is told."""
    stepped = threading.Event()

    def away(*_: Any) -> None:
        assert stepped.wait(60)
        raise OSError("503 Slow Down")

    monkeypatch.setattr(Folder, "write", away)
    profile = Profile(1, alone(torch.device("cpu")), Folder("memory://run"))
    [found] = [event for step in (1, 2, 3, 4) for event in after(profile, step)]
    assert isinstance(found, Profiled)
    stepped.set()
    if goes_on:
        profile.wait(60.0)
        [told] = after(profile, 5)
        assert isinstance(told, Warned)
        assert told.reason == "the trace could not be written: 503 Slow Down"
    profile.close()
    assert after(profile, 6) == []
    assert ("503 Slow Down" in caplog.text) != goes_on
