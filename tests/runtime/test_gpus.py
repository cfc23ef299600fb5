"""Which GPU of the data sheets a device is."""

import pytest

from bapo_megatron.runtime.gpus import peak_flops, recognize_gpu


@pytest.mark.parametrize(
    ("device_name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_a_device_has_the_peak_of_its_data_sheet_or_none(
    device_name: str, flops: float | None
) -> None:
    gpu = recognize_gpu(device_name)
    assert (gpu and peak_flops(gpu, "bfloat16", "none")) == flops
