"""Support code for the tests: real servers, proxies that inject faults, fake ports, waiting."""
