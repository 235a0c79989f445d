//! Policy core: pure, no system calls.
