"""Fabricated ``/proc``, ``/sys`` and ``/dev``, and hosts as the doctor finds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvwire.backend import Finding
from kvwire.cli.doctor.examination import Examination, Transport
from kvwire.cli.doctor.facts import Machine, Process, RdmaPort

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max open files            {files:<20} 1048576              files
Max locked memory         {locked:<20} unlimited            bytes
"""

# Lines as the kernel and the driver write them.
IB = {
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)\n",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "dev/infiniband/uverbs0": "",
}
GPU = {
    "proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  "
        "Release Build  (dvs-builder@U16)\nGCC version:  gcc version 12.2.0\n"
    ),
    "proc/driver/nvidia/gpus/0000:19:00.0/information": (
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\nBus Type: \t PCIe\n"
    ),
    "proc/driver/nvidia/gpus/0000:3b:00.0/information": "Model: \t\t NVIDIA H200\n",
    "dev/nvidia0": "",
    "dev/nvidia1": "",
    "dev/nvidiactl": "",
}


def tree(root: Path, files: Mapping[str, str]) -> Path:
    """Make files with their texts below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def port(state: str = "ACTIVE") -> RdmaPort:
    return RdmaPort(
        device="mlx5_0",
        number=1,
        state=state,
        rate="200 Gb/sec",
        link_layer="InfiniBand",
    )


def machine(**facts: Any) -> Machine:
    versions = {"kvwire": "0.1.0", "Python": "3.12.9", "uvloop": "0.22.1"}
    return Machine(**{"system": "Linux 6.8.0 x86_64", "versions": versions} | facts)


def examination(
    host: Machine | None = None,
    *,
    transports: tuple[Transport, ...] = (
        Transport(name="tcp", available=True, reason="sockets"),
    ),
    findings: tuple[Finding, ...] = (
        Finding(name="descriptors", state="ok", text="20,000"),
    ),
    asked: tuple[Finding, ...] = (),
    pid: int = 0,
) -> Examination:
    """A host where nothing is the matter, but for what is said."""
    return Examination(
        machine=host or machine(),
        process=Process(pid=pid),
        transports=transports,
        findings=findings,
        asked=asked,
    )
