// See jobs.h.
#include "client/python/src/jobs.h"

#include <google/protobuf/util/json_util.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/internal/shard_server.h"
#include "gradwire/v1/operator.pb.h"

namespace gradwire {
namespace {

using Answer = std::pair<int, std::string>;

Answer Failed(const absl::Status& status) { return {static_cast<int>(status.code()), std::string(status.message())}; }

Answer DescribeJob(const std::string& address, const std::string& job, int64_t timeout_ms) {
  const auto server = client::Server::ConnectServing(address, timeout_ms);
  if (!server.ok()) return Failed(server.status());
  v1::DescribeJobRequest request;
  request.set_job(job);
  const auto status = server->Call<v1::JobStatus>("DescribeJob", request);
  if (!status.ok()) return Failed(status.status());
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  Answer answer{0, ""};
  (void)google::protobuf::util::MessageToJsonString(*status, &answer.second, options);
  return answer;
}

std::vector<Answer> DescribeOnAll(const std::vector<std::string>& servers, const std::string& job, int64_t timeout_ms) {
  std::vector<std::future<Answer>> asked;
  for (const std::string& server : servers) {
    asked.push_back(
        std::async(std::launch::async, [&server, &job, timeout_ms] { return DescribeJob(server, job, timeout_ms); }));
  }
  std::vector<Answer> answers;
  for (std::future<Answer>& answer : asked) answers.push_back(answer.get());
  return answers;
}

Answer DeleteUnusedJob(const std::string& address, const std::string& job, uint64_t version, int64_t timeout_ms) {
  const auto server = client::Server::ConnectServing(address, timeout_ms);
  if (!server.ok()) return Failed(server.status());
  v1::DeleteJobRequest request;
  request.set_job(job);
  request.set_only_unused(true);
  request.set_version(version);
  const absl::Status deleted = server->Call<v1::DeleteJobReply>("DeleteJob", request).status();
  return deleted.ok() ? Answer{0, ""} : Failed(deleted);
}

}  // namespace

void AddJobs(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("describe_job", &DescribeOnAll, py::arg("servers"), py::arg("job"), py::arg("timeout_ms"),
        py::call_guard<py::gil_scoped_release>());
  m.def("delete_unused_job", &DeleteUnusedJob, py::arg("server"), py::arg("job"), py::arg("version"),
        py::arg("timeout_ms"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace gradwire
