// GW_CLONES: compiles a function for several x86 levels and picks one at load time. Bits do not change: contraction is
// off and only exactly rounded operations are used. Off under sanitizers (their runtime starts after the resolvers) and
// for compilers without the attribute.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(GRADWIRE_NO_CLONES)
#define GW_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define GW_CLONES
#endif
