// Tells ThreadSanitizer about absl::Mutex. The distribution's Abseil is not instrumented, so its mutexes would be
// invisible and every correct use of one would look like a race. The linker sends calls of these functions here
// (wrap.txt); each calls the real one and declares the synchronisation. Linked into thread-sanitized tests only.
#include <sanitizer/tsan_interface.h>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#define GW_MUTEX(name) "_ZN4absl7debian35Mutex" name

void RealLock(absl::Mutex*) asm("__real_" GW_MUTEX("4LockEv"));
void RealUnlock(absl::Mutex*) asm("__real_" GW_MUTEX("6UnlockEv"));
void RealAwait(absl::Mutex*, const absl::Condition&) asm("__real_" GW_MUTEX("5AwaitERKNS0_9ConditionE"));
bool RealAwaitTimeout(absl::Mutex*, const absl::Condition&,
                      absl::Duration) asm("__real_" GW_MUTEX("16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE"));
bool RealAwaitDeadline(absl::Mutex*, const absl::Condition&,
                       absl::Time) asm("__real_" GW_MUTEX("17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE"));

#define GW_CONDVAR(name) "_ZN4absl7debian37CondVar" name

void RealWait(absl::CondVar*, absl::Mutex*) asm("__real_" GW_CONDVAR("4WaitEPNS0_5MutexE"));
bool RealWaitTimeout(absl::CondVar*, absl::Mutex*,
                     absl::Duration) asm("__real_" GW_CONDVAR("15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE"));
bool RealWaitDeadline(absl::CondVar*, absl::Mutex*,
                      absl::Time) asm("__real_" GW_CONDVAR("16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE"));

void WrapWait(absl::CondVar*, absl::Mutex*) asm("__wrap_" GW_CONDVAR("4WaitEPNS0_5MutexE"));
bool WrapWaitTimeout(absl::CondVar*, absl::Mutex*,
                     absl::Duration) asm("__wrap_" GW_CONDVAR("15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE"));
bool WrapWaitDeadline(absl::CondVar*, absl::Mutex*,
                      absl::Time) asm("__wrap_" GW_CONDVAR("16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE"));

void WrapLock(absl::Mutex*) asm("__wrap_" GW_MUTEX("4LockEv"));
void WrapUnlock(absl::Mutex*) asm("__wrap_" GW_MUTEX("6UnlockEv"));
void WrapAwait(absl::Mutex*, const absl::Condition&) asm("__wrap_" GW_MUTEX("5AwaitERKNS0_9ConditionE"));
bool WrapAwaitTimeout(absl::Mutex*, const absl::Condition&,
                      absl::Duration) asm("__wrap_" GW_MUTEX("16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE"));
bool WrapAwaitDeadline(absl::Mutex*, const absl::Condition&,
                       absl::Time) asm("__wrap_" GW_MUTEX("17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE"));

extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);

namespace {

// Whoever lets go of a mutex evaluates the conditions of those who wait for it: reads of their stacks, which come after
// the release that is declared here and so would look like races with what they do next.
struct IgnoreReads {
  IgnoreReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~IgnoreReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};

}  // namespace

void WrapLock(absl::Mutex* mu) {
  RealLock(mu);
  __tsan_acquire(mu);
}

void WrapUnlock(absl::Mutex* mu) {
  __tsan_release(mu);
  const IgnoreReads reads;
  RealUnlock(mu);
}

void WrapAwait(absl::Mutex* mu, const absl::Condition& condition) {
  __tsan_release(mu);
  {
    const IgnoreReads reads;
    RealAwait(mu, condition);
  }
  __tsan_acquire(mu);
}

bool WrapAwaitTimeout(absl::Mutex* mu, const absl::Condition& condition, absl::Duration timeout) {
  __tsan_release(mu);
  const bool held = [&] {
    const IgnoreReads reads;
    return RealAwaitTimeout(mu, condition, timeout);
  }();
  __tsan_acquire(mu);
  return held;
}

bool WrapAwaitDeadline(absl::Mutex* mu, const absl::Condition& condition, absl::Time deadline) {
  __tsan_release(mu);
  const bool held = [&] {
    const IgnoreReads reads;
    return RealAwaitDeadline(mu, condition, deadline);
  }();
  __tsan_acquire(mu);
  return held;
}

// A condition variable releases the mutex while it waits and holds it again when it returns.
void WrapWait(absl::CondVar* condition, absl::Mutex* mu) {
  __tsan_release(mu);
  {
    const IgnoreReads reads;
    RealWait(condition, mu);
  }
  __tsan_acquire(mu);
}

bool WrapWaitTimeout(absl::CondVar* condition, absl::Mutex* mu, absl::Duration timeout) {
  __tsan_release(mu);
  const bool timed_out = [&] {
    const IgnoreReads reads;
    return RealWaitTimeout(condition, mu, timeout);
  }();
  __tsan_acquire(mu);
  return timed_out;
}

bool WrapWaitDeadline(absl::CondVar* condition, absl::Mutex* mu, absl::Time deadline) {
  __tsan_release(mu);
  const bool timed_out = [&] {
    const IgnoreReads reads;
    return RealWaitDeadline(condition, mu, deadline);
  }();
  __tsan_acquire(mu);
  return timed_out;
}
