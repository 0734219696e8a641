"""kvwire over verbs, on machines that have no RDMA device: `make test-rdma`."""
