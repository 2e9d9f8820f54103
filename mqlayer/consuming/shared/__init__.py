"""Shared groups: every member reads all partitions, without order. Protocol: `docs/design/shared-groups.md`;
crashes: `docs/design/crash-matrix.md`."""
