// A shard server in the process of Python.
#pragma once

#include <pybind11/pybind11.h>

namespace gradwire {

// Server(flags): starts one. flags: those of gradwire-server; what it has to say goes to standard error.
//   .addresses   .in_use(): a job has workers   .stop(): at once; nothing where it has stopped, or in a fork. DataLoss
//   for rounds of durable jobs that were not written yet
// Threads of the server never take the GIL, which nothing here keeps.
void AddServer(pybind11::module_& m);

}  // namespace gradwire
