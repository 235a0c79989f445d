//! Harness of the integration tests.
