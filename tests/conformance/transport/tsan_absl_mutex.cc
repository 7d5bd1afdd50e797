// Tells ThreadSanitizer about absl::Mutex. The distribution's Abseil is not instrumented, so its mutexes would be
// invisible and every correct use of one would look like a race. The linker sends calls of these functions here
// (tsan_wrap.txt); each calls the real one and declares the synchronisation.
#include <sanitizer/tsan_interface.h>

namespace {
// Functions of a C++ class called by their mangled names: `this` is the first argument.
using Self = void;
}  // namespace

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
