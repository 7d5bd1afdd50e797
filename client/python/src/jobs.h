// What Python asks the servers about a job.
#pragma once

#include <pybind11/pybind11.h>

namespace gradwire {

// describe_job(servers, job, timeout_ms): per shard, (0, the JobStatus as JSON) or (status code, message).
// delete_unused_job(server, job, version, timeout_ms): (0, "") or (status code, message).
// Neither keeps the GIL.
void AddJobs(pybind11::module_& m);

}  // namespace gradwire
