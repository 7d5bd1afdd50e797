// gradwire._core: the C++ session for Python. Memory is shared with NumPy arrays and DLPack capsules, never copied; the
// GIL is released while the session works; statuses become exceptions of gradwire._errors.
#include <google/protobuf/util/json_util.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/internal/checkpoint.h"
#include "client/cpp/internal/ways.h"
#include "client/python/src/device.h"
#include "client/python/src/jobs.h"
#include "client/python/src/raise.h"
#include "client/python/src/server.h"
#include "client/python/src/tensor.h"
#include "common/base/status_macros.h"
#include "common/codec/family.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/storage/posix_disk.h"
#include "gradwire/session.h"
#include "kernels/cuda/async_backend.h"

namespace py = pybind11;

namespace gradwire {
namespace {

v1::JobSpec ParseJob(const std::string& json) {
  v1::JobSpec spec;
  const auto status = google::protobuf::util::JsonStringToMessage(json, &spec);
  if (!status.ok()) Check(absl::InvalidArgumentError(absl::StrCat("the job: ", std::string(status.message()))));
  return spec;
}

PullMode ParsePull(const std::string& pull) {
  if (pull == "update") return PullMode::kUpdate;
  if (pull == "params") return PullMode::kParams;
  if (pull == "params_bf16") return PullMode::kParamsBf16;
  if (pull == "mean") return PullMode::kMean;
  throw py::value_error(absl::StrCat("pull='", pull, "' must be 'update', 'params', 'params_bf16' or 'mean'"));
}

absl::Status ReadCheckpoint(const std::string& path, const v1::JobSpec& spec) {
  const py::gil_scoped_release release;
  GW_ASSIGN_OR_RETURN(const Job job, Job::Make(spec));
  PosixDisk disk;
  return client::CheckpointFile::ReadForNewJob(disk, path, job).status();
}

// Raises what a session that begins the job with this file would; reads all of it.
void CheckCheckpoint(const std::string& path, const std::string& job_json) {
  Check(ReadCheckpoint(path, ParseJob(job_json)));
}

// What of a job does not go with a session whose tensors lie on a GPU; empty where all does.
std::string WhyNotOnGpu(const std::string& job_json, const std::string& pull) {
  const absl::StatusOr<Job> job = Job::Make(ParseJob(job_json));
  Check(job.status());
  return std::string(job->CheckGoesWith(client::WaysOf(ParsePull(pull), /*on_gpu=*/true)).message());
}

// A device, and the stream that arrays on their way to a session are made ready for: DLPack's producers let it wait.
class PyDevice {
 public:
  PyDevice(int type, int index) : name_{type, index} {
    auto opened = OpenDevice(type, index);
    Check(opened.status());
    device_ = *std::move(opened);
    stream_ = device_->runtime().NewStream();
  }
  ~PyDevice() {
    if (getpid() == process_) device_->runtime().DeleteStream(stream_);  // a device does not survive fork()
  }
  PyDevice(const PyDevice&) = delete;
  PyDevice& operator=(const PyDevice&) = delete;

  const DlDevice& name() const { return name_; }
  const std::shared_ptr<Device>& device() const { return device_; }
  Stream* stream() const { return stream_; }

 private:
  const pid_t process_ = getpid();
  const DlDevice name_;
  std::shared_ptr<Device> device_;
  Stream* stream_ = nullptr;
};

// What a session wants people to know, until Python asks. Keeps the newest 64.
class Notices {
 public:
  void Add(const std::string& text) {
    const std::lock_guard lock(mu_);
    if (texts_.size() < 64) texts_.push_back(text);
  }
  std::vector<std::string> Take() {
    const std::lock_guard lock(mu_);
    return std::exchange(texts_, {});
  }

 private:
  std::mutex mu_;
  std::vector<std::string> texts_;
};

// Keeps the arrays alive that the session borrows.
class PySession {
 private:
  template <typename F>
  static auto Released(F f) {
    py::gil_scoped_release release;
    return f();
  }
  template <typename F>
  static void Call(F f) {
    Check(Released(f));
  }

 public:
  PySession(std::vector<std::string> servers, const std::string& job_json, std::string worker, const std::string& pull,
            const std::vector<py::object>& memory, int64_t connect_timeout_ms, int64_t start_timeout_ms,
            int64_t rpc_timeout_ms, int64_t round_timeout_ms, int64_t reconnect_timeout_ms, std::string backend,
            std::string resume_from, std::shared_ptr<PyDevice> device, bool resume_anew, uint32_t encode_threads,
            std::string trace_path, uint64_t trace_first_round, uint64_t trace_rounds, bool early_updates)
      : device_(std::move(device)) {
    SessionOptions options;
    options.servers = std::move(servers);
    options.job = ParseJob(job_json);
    options.worker = std::move(worker);
    options.pull = ParsePull(pull);
    for (size_t t = 0; t < memory.size(); ++t) {
      if (memory[t].is_none()) {  // its mean is not wanted
        options.memory.emplace_back();
        continue;
      }
      const std::string name = static_cast<int>(t) < options.job.tensors_size()
                                   ? options.job.tensors(static_cast<int>(t)).name()
                                   : std::to_string(t);
      const std::string what = absl::StrCat("the parameter '", name, "'");
      const BorrowedTensor& tensor = memory_.emplace_back(memory[t], DeviceName(), what, true);
      options.memory.push_back(tensor.values());
      if (static_cast<int>(t) < options.job.tensors_size())
        CheckShape(tensor, what, options.job.tensors(static_cast<int>(t)).shape());
    }
    if (device_ != nullptr) {
      options.place.device = device_->device();
      options.place.stream = device_->stream();
    }
    options.timeouts.connect_ms = connect_timeout_ms;
    options.timeouts.start_ms = start_timeout_ms;
    options.timeouts.rpc_ms = rpc_timeout_ms;
    options.timeouts.round_ms = round_timeout_ms;
    options.timeouts.reconnect_ms = reconnect_timeout_ms;
    round_timeout_ms_ = round_timeout_ms;
    options.backend = std::move(backend);
    options.resume.from = std::move(resume_from);
    options.resume.anew = resume_anew;
    options.encode_threads = encode_threads;
    options.early_updates = early_updates;
    options.trace.path = std::move(trace_path);
    options.trace.first_round = trace_first_round;
    options.trace.rounds = trace_rounds;
    options.notice = [notices = notices_](const std::string& text) { notices->Add(text); };
    session_ = Join(std::move(options));
    gradients_.resize(session_->job().tensors().size());
  }

  ~PySession() {
    if (!SameProcess()) {  // the threads and connections belong to the parent; leave them alone
      (void)session_.release();
      return;
    }
    py::gil_scoped_release release;
    session_.reset();
  }

  void BeginRound(const std::vector<float>& learning_rates) {
    CheckProcess();
    Call([&] { return session_->BeginRound(learning_rates); });
  }

  void BeginReplacement() {
    CheckProcess();
    Call([&] { return session_->BeginReplacement(); });
  }

  void TensorReady(uint32_t tensor, const py::object& gradient) {
    CheckProcess();
    Ready(tensor, GradientOf(tensor, gradient));
  }

  void RowsReady(uint32_t tensor, const py::object& rows, const py::object& values) {
    CheckProcess();
    const Tensor& info = TensorAt(tensor);
    const std::string what = absl::StrCat("the gradient of '", info.name, "'");
    GivenRows given(rows, values, what, info.shape);
    Check(session_->RowsReady(tensor, given.gradient()));
    rows_[tensor] = std::move(given);
  }

  // After Ctrl-C the round is still open.
  void EndRound(int64_t timeout_ms) {
    CheckProcess();
    const absl::Status status =
        InSlices(timeout_ms, [&](int64_t slice_ms) { return session_->EndRound(slice_ms, stream()); });
    // These two leave the round open, and its gradients borrowed.
    if (!absl::IsDeadlineExceeded(status) && !absl::IsFailedPrecondition(status)) {
      for (auto& gradient : gradients_) gradient.reset();
      rows_.clear();
    }
    Check(status);
  }

  void Exchange(const std::vector<py::object>& gradients, const std::vector<float>& learning_rates,
                int64_t timeout_ms) {
    const auto& tensors = session_->job().tensors();
    if (gradients.size() != tensors.size()) {
      throw py::value_error(absl::StrCat(gradients.size(), " gradients for ", tensors.size(), " tensors"));
    }
    std::vector<BorrowedTensor> borrowed;
    for (size_t t = 0; t < gradients.size(); ++t)
      borrowed.push_back(GradientOf(static_cast<uint32_t>(t), gradients[t]));
    BeginRound(learning_rates);
    for (size_t t = gradients.size(); t-- > 0;) Ready(static_cast<uint32_t>(t), std::move(borrowed[t]));
    EndRound(timeout_ms);
  }

  void Save(const std::string& path, const std::map<std::string, std::string>& notes) {
    CheckProcess();
    Call([&] { return session_->Save(path, notes); });
  }

  void Drain(int64_t timeout_ms) {
    CheckProcess();
    Check(InSlices(timeout_ms, [&](int64_t slice_ms) { return session_->Drain(slice_ms, stream()); }));
  }

  void Leave(bool drain) {
    CheckProcess();
    absl::Status drained;
    if (drain) drained = InSlices(-1, [&](int64_t slice_ms) { return session_->Drain(slice_ms, stream()); });
    Call([&] { return session_->Leave(/*drain=*/false); });
    // In the middle of a round, or when the session has failed, there is nothing to drain.
    if (absl::IsDeadlineExceeded(drained) || absl::IsInvalidArgument(drained)) Check(drained);
  }

  py::dict Stats() const {
    const SessionStats s = session_->stats();
    py::dict d;
    d["steps"] = s.steps;
    d["pushed_bytes"] = s.pushed_bytes;
    d["pulled_bytes"] = s.pulled_bytes;
    d["start_bytes"] = s.start_bytes;
    d["selected_elements"] = s.selected_elements;
    d["deferred_elements"] = s.deferred_elements;
    d["sanitized_elements"] = s.sanitized_elements;
    d["not_included_frames"] = s.not_included_frames;
    d["skipped_rounds"] = s.skipped_rounds;
    d["nonfinite_rounds"] = s.nonfinite_rounds;
    d["members"] = s.members;
    d["encode_seconds"] = s.encode_seconds;
    d["apply_seconds"] = s.apply_seconds;
    d["wait_seconds"] = s.wait_seconds;
    return d;
  }

  std::vector<std::string> TakeNotices() { return notices_->Take(); }

  std::string Digest() const {
    return Released([&] { return session_->Digest(); });
  }
  uint32_t Checksum() const {
    return Released([&] { return session_->Checksum(); });
  }
  std::vector<std::string> ShardDigests() const {
    return Released([&] { return session_->ShardDigests(); });
  }
  uint64_t version() const { return session_->version(); }
  uint64_t start_version() const { return session_->start_version(); }
  uint64_t start_step() const { return session_->start_step(); }
  bool resumed() const { return session_->resumed(); }
  uint32_t buckets() const { return session_->layout().bucket_count(); }

 private:
  // Waits in slices, so that Ctrl-C is heard.
  template <typename F>
  absl::Status InSlices(int64_t timeout_ms, F wait) {
    const auto begin = std::chrono::steady_clock::now();
    const int64_t limit_ms = timeout_ms < 0 ? round_timeout_ms_ : timeout_ms;
    absl::Status status;
    do {
      const int64_t spent_ms =
          std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin).count();
      const int64_t slice_ms = std::min(kSignalSliceMs, limit_ms - spent_ms);
      if (slice_ms < 0) break;
      status = Released([&] { return wait(slice_ms); });
      // What has come to its end is told first: an interrupt would hide it.
      if (!absl::IsDeadlineExceeded(status)) break;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    } while (true);
    return status;
  }

  // On a thread of its own, so that this one hears Ctrl-C meanwhile; then the job is left again.
  static std::unique_ptr<Session> Join(SessionOptions options) {
    std::stop_source stop;
    options.stop = stop.get_token();
    auto joining = std::async(std::launch::async, [&options] { return Session::Join(std::move(options)); });
    const auto done = [&joining] {
      return joining.wait_for(std::chrono::milliseconds(kSignalSliceMs)) == std::future_status::ready;
    };
    bool interrupted = false;
    while (!interrupted && !Released(done)) interrupted = PyErr_CheckSignals() != 0;
    auto session = Released([&] {
      if (interrupted) stop.request_stop();
      return joining.get();
    });
    if (interrupted) {
      Released([&session] { return session.ok() ? (*session)->Leave() : session.status(); }).IgnoreError();
      throw py::error_already_set();
    }
    Check(session.status());
    return *std::move(session);
  }

  const DlDevice* DeviceName() const { return device_ == nullptr ? nullptr : &device_->name(); }
  Stream* stream() const { return device_ == nullptr ? nullptr : device_->stream(); }

  void Ready(uint32_t tensor, BorrowedTensor gradient) {
    Check(session_->TensorReady(tensor, gradient.values().data(), stream()));
    gradients_[tensor] = std::move(gradient);
  }

  const Tensor& TensorAt(uint32_t tensor) const {
    const auto& tensors = session_->job().tensors();
    if (tensor >= tensors.size()) throw py::index_error(absl::StrCat("tensor index ", tensor, " of ", tensors.size()));
    return tensors[tensor];
  }

  BorrowedTensor GradientOf(uint32_t tensor, const py::object& gradient) const {
    const Tensor& info = TensorAt(tensor);
    const std::string what = absl::StrCat("the gradient of '", info.name, "'");
    BorrowedTensor borrowed(gradient, DeviceName(), what, false);
    CheckShape(borrowed, what, info.shape);
    return borrowed;
  }

  // The tensor's own shape, or flat.
  template <typename Shape>
  static void CheckShape(const BorrowedTensor& array, const std::string& what, const Shape& shape) {
    const std::vector<uint64_t>& found = array.shape();
    const std::vector<uint64_t> wanted(shape.begin(), shape.end());
    uint64_t elements = 1;
    for (uint64_t d : wanted) elements *= d;
    if (found == wanted || (found.size() == 1 && found[0] == elements)) return;
    throw py::value_error(absl::StrCat(what, " has shape [", absl::StrJoin(found, ", "), "], the tensor has [",
                                       absl::StrJoin(wanted, ", "), "]"));
  }

  bool SameProcess() const { return getpid() == process_; }
  void CheckProcess() const {
    if (!SameProcess())
      Check(absl::FailedPreconditionError("a session does not survive fork(): start workers by spawn"));
  }

  static constexpr int64_t kSignalSliceMs = 200;
  const pid_t process_ = getpid();
  int64_t round_timeout_ms_ = 0;

  const std::shared_ptr<Notices> notices_ = std::make_shared<Notices>();
  const std::shared_ptr<PyDevice> device_;  // null: in host memory
  std::unique_ptr<Session> session_;
  std::vector<BorrowedTensor> memory_;
  std::vector<std::optional<BorrowedTensor>> gradients_;
  std::map<uint32_t, GivenRows> rows_;  // of the open round, as gradients_
};

std::string RoleName(const std::string& name, const std::vector<uint64_t>& shape) {
  return absl::AsciiStrToLower(v1::Role_Name(GuessRole(name, shape)).substr(5));  // without "ROLE_"
}

std::map<std::string, bool> DefaultsOfCodec(const std::string& codec) {
  const absl::StatusOr<CodecSpec> spec = ParseCodecSpec(codec);
  Check(spec.status());
  const TrainingDefaults defaults = FamilyOf(*spec).Training(*spec);
  return {{"push_steps", defaults.push_steps},
          {"gradients_to_sgd", defaults.gradients_to_sgd},
          {"small_dense", defaults.small_dense},
          {"union_back", defaults.union_back}};
}

}  // namespace
}  // namespace gradwire

PYBIND11_MODULE(_core, m) {
  using gradwire::PyDevice;
  using gradwire::PySession;
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);  // Debian's Abseil looks in release builds, too
  m.doc() = "The C++ session of Gradwire; use the names of the package gradwire instead.";
  m.def("guess_role", &gradwire::RoleName, py::arg("name"), py::arg("shape"));
  m.def("codec_names", &gradwire::CodecNames);
  m.def("training_defaults", &gradwire::DefaultsOfCodec, py::arg("codec"));
  m.def("check_checkpoint", &gradwire::CheckCheckpoint, py::arg("path"), py::arg("job_json"));
  m.def("why_not_on_gpu", &gradwire::WhyNotOnGpu, py::arg("job_json"), py::arg("pull"));
  gradwire::AddJobs(m);
  gradwire::AddServer(m);
  py::class_<PyDevice, std::shared_ptr<PyDevice>>(m, "Device")
      .def(py::init<int, int>(), py::arg("type"), py::arg("index"))
      .def_property_readonly("stream",
                             [](const PyDevice& device) { return reinterpret_cast<uintptr_t>(device.stream()); });
  py::class_<PySession>(m, "Session")
      .def(py::init<std::vector<std::string>, const std::string&, std::string, const std::string&,
                    const std::vector<py::object>&, int64_t, int64_t, int64_t, int64_t, int64_t, std::string,
                    std::string, std::shared_ptr<PyDevice>, bool, uint32_t, std::string, uint64_t, uint64_t, bool>(),
           py::arg("servers"), py::arg("job_json"), py::arg("worker"), py::arg("pull"), py::arg("memory"),
           py::arg("connect_timeout_ms"), py::arg("start_timeout_ms"), py::arg("rpc_timeout_ms"),
           py::arg("round_timeout_ms"), py::arg("reconnect_timeout_ms"), py::arg("backend"), py::arg("resume_from"),
           py::arg("device") = py::none(), py::arg("resume_anew") = false, py::arg("encode_threads") = 1,
           py::arg("trace_path") = "", py::arg("trace_first_round") = 2, py::arg("trace_rounds") = 1,
           py::arg("early_updates") = false)
      .def("begin_round", &PySession::BeginRound)
      .def("begin_replacement", &PySession::BeginReplacement)
      .def("tensor_ready", &PySession::TensorReady)
      .def("rows_ready", &PySession::RowsReady, py::arg("tensor"), py::arg("rows"), py::arg("values"))
      .def("end_round", &PySession::EndRound, py::arg("timeout_ms") = -1)
      .def("exchange", &PySession::Exchange, py::arg("gradients"), py::arg("learning_rates"),
           py::arg("timeout_ms") = -1)
      .def("save", &PySession::Save, py::arg("path"), py::arg("notes"))
      .def("drain", &PySession::Drain, py::arg("timeout_ms") = -1)
      .def("leave", &PySession::Leave, py::arg("drain") = true)
      .def("stats", &PySession::Stats)
      .def("take_notices", &PySession::TakeNotices)
      .def("digest", &PySession::Digest)
      .def("checksum", &PySession::Checksum)
      .def("shard_digests", &PySession::ShardDigests)
      .def_property_readonly("version", &PySession::version)
      .def_property_readonly("start_version", &PySession::start_version)
      .def_property_readonly("start_step", &PySession::start_step)
      .def_property_readonly("resumed", &PySession::resumed)
      .def_property_readonly("buckets", &PySession::buckets);
}
