// Priority of one thread is Linux's reading of setpriority; see background_work.h.
#include "common/base/background_work.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/base/out_of_memory.h"

namespace gradwire {
namespace {

constexpr int kLowestPriority = 19;
constexpr int kPauses = 5;  // for each unit of time at work: a share of 1/6
constexpr absl::Duration kShortestSleep = absl::Milliseconds(1);

thread_local BackgroundWork* work_here = nullptr;
thread_local absl::Duration rested_at;  // the thread's CPU time

absl::Duration CpuTime() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return absl::DurationFromTimespec(time);
}

}  // namespace

absl::Status BackgroundWork::Run(const char* what, const std::function<absl::Status()>& body) {
  absl::Status status;
  try {
    std::thread([&] {
      // Whoever may not lower it goes on at the usual one.
      setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kLowestPriority);
      pthread_setname_np(pthread_self(), "background");
      work_here = this;
      status = CatchBadAlloc(what, body);
    }).join();
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat(what, ": no thread: ", error.what()));
  }
  return status;
}

void BackgroundWork::Hurry() {
  absl::MutexLock lock(&mu_);
  hurry_ = true;
}

void BackgroundWork::Cancel() {
  absl::MutexLock lock(&mu_);
  cancelled_ = true;
}

absl::Status BackgroundWork::Rest() { return work_here == nullptr ? absl::OkStatus() : work_here->Sleep(); }

absl::Status BackgroundWork::Sleep() {
  const absl::Duration pause = kPauses * (CpuTime() - rested_at);
  absl::MutexLock lock(&mu_);
  if (pause >= kShortestSleep) {
    mu_.AwaitWithTimeout(absl::Condition(this, &BackgroundWork::MayGoOn), pause);
    rested_at = CpuTime();
  }
  return cancelled_ ? absl::CancelledError("it is not wanted any more") : absl::OkStatus();
}

}  // namespace gradwire
