//! Talks to the kernel's SMC: sockets (`SMC_DIAG`) and generic netlink.
