"""Regions of the ranks and how they are shared; pages, mailboxes and records that host and kernels both use."""
