/* The worker's side of Gradwire for C, and for whatever calls C. What it does is session.h's, where each function's
 * C++ twin says more: join a job, exchange gradients every step, leave. Tensors lie in host memory.
 *
 *   gradwire_options options = gradwire_no_options();
 *   options.servers = servers; ...
 *   if (gradwire_join(&options, &session) != GRADWIRE_OK) puts(gradwire_last_error());
 *   for (...) gradwire_exchange(session, gradients, 1, &rate, 1);
 *   gradwire_leave(session, 1);
 *   gradwire_free(session);
 *
 * Stable within a minor version of the library, which its soname has: functions and fields are only added, fields at
 * the end of the structs that have a struct_size, which says how much of them the caller knows. Functions that return a
 * gradwire_code return GRADWIRE_OK, or an error that gradwire_last_error() describes. Thread-safe as a Session is: one
 * thread at a time drives a round, gradwire_tensor_ready may be called from any. No function throws. */
#ifndef GRADWIRE_C_H_
#define GRADWIRE_C_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The codes of absl::Status and gRPC. */
typedef enum gradwire_code {
  GRADWIRE_OK = 0,
  GRADWIRE_CANCELLED = 1,
  GRADWIRE_UNKNOWN = 2,
  GRADWIRE_INVALID_ARGUMENT = 3,
  GRADWIRE_DEADLINE_EXCEEDED = 4, /* of gradwire_end_round: the round stays open, call it again */
  GRADWIRE_NOT_FOUND = 5,
  GRADWIRE_ALREADY_EXISTS = 6,
  GRADWIRE_PERMISSION_DENIED = 7,
  GRADWIRE_RESOURCE_EXHAUSTED = 8,
  GRADWIRE_FAILED_PRECONDITION = 9,
  GRADWIRE_ABORTED = 10,
  GRADWIRE_OUT_OF_RANGE = 11,
  GRADWIRE_UNIMPLEMENTED = 12,
  GRADWIRE_INTERNAL = 13,
  GRADWIRE_UNAVAILABLE = 14, /* a shard is lost: join again to go on */
  GRADWIRE_DATA_LOSS = 15,
  GRADWIRE_UNAUTHENTICATED = 16
} gradwire_code;

/* What a worker pulls after each round. */
typedef enum gradwire_pull {
  GRADWIRE_PULL_UPDATE = 0,      /* update frames; the session replays the optimizer */
  GRADWIRE_PULL_PARAMS = 1,      /* parameters in float32 */
  GRADWIRE_PULL_PARAMS_BF16 = 2, /* parameters rounded to bfloat16 */
  GRADWIRE_PULL_MEAN = 3         /* the mean of what was pushed; of a job whose optimizer is OPTIMIZER_NONE */
} gradwire_pull;

/* float32 elements of one tensor. */
typedef struct gradwire_tensor {
  float* data;
  size_t elements;
} gradwire_tensor;

typedef struct gradwire_options {
  size_t struct_size;         /* sizeof(gradwire_options), which gradwire_no_options sets */
  const char* const* servers; /* address of shard i at index i, the same list on every worker */
  size_t server_count;
  const char* job;    /* gradwire.v1.JobSpec (job.proto) in protobuf's JSON form, the same on every worker */
  const char* worker; /* a name of its own in the job */
  int32_t pull;       /* a gradwire_pull */
  /* One for each tensor of the job, of its size: the parameters (initial values on entry), or for GRADWIRE_PULL_MEAN
   * where means are written. They stay the caller's, and must be there until gradwire_free. */
  const gradwire_tensor* tensors;
  size_t tensor_count;
  const char* resume_from; /* a file of gradwire_save; null: a newcomer */
  int64_t connect_ms;      /* 0 of these four: SessionTimeouts' defaults */
  int64_t start_ms;
  int64_t rpc_ms;
  int64_t round_ms;
  uint32_t encode_threads; /* 0: one */
  /* Called with what a person may want to know (a shard is away, a worker has gone), from threads of the session until
   * gradwire_free, with `notice_data`. Must return quickly and call nothing of this session. May be null. */
  void (*notice)(void* notice_data, const char* text);
  void* notice_data;
  int64_t reconnect_ms; /* how long a shard that cannot be reached is tried again; 0: SessionTimeouts' default */
} gradwire_options;

/* Options with nothing in them but their size: begin with these. */
static inline gradwire_options gradwire_no_options(void) {
  gradwire_options options;
  memset(&options, 0, sizeof(options));
  options.struct_size = sizeof(options);
  return options;
}

typedef struct gradwire_stats {
  size_t struct_size; /* sizeof(gradwire_stats), set by the caller; the library sets what it does not know to 0 */
  uint64_t steps;
  uint64_t skipped_rounds;
  uint64_t nonfinite_rounds;
  uint64_t pushed_bytes; /* headers counted, as in the next one */
  uint64_t pulled_bytes;
  uint32_t members;
  double encode_seconds;
  double apply_seconds;
  double wait_seconds; /* of callers, inside gradwire_end_round */
} gradwire_stats;

typedef struct gradwire_session gradwire_session;

/* "MAJOR.MINOR.PATCH" of the library. */
const char* gradwire_library_version(void);

/* What the last call on this thread that failed had to say; "" before the first. Valid until the next one fails. */
const char* gradwire_last_error(void);

/* Blocks until the parameters of the start version are in the tensors. `*session` is null where it fails. */
gradwire_code gradwire_join(const gradwire_options* options, gradwire_session** session);

/* `learning_rates`: one per parameter group, or one for all. */
gradwire_code gradwire_begin_round(gradwire_session* session, const float* learning_rates, size_t count);
/* `gradient`, of all elements of the tensor, must stay unchanged until gradwire_end_round has returned. */
gradwire_code gradwire_tensor_ready(gradwire_session* session, uint32_t tensor, const float* gradient);
/* The same of a gradient that is 0 but for some rows of the tensor, along its first dimension: `values` has row after
 * row, in the order of `rows`, which ascend. With codec zen or adaptive the work grows with them, else with the tensor.
 */
gradwire_code gradwire_rows_ready(gradwire_session* session, uint32_t tensor, const int64_t* rows, size_t row_count,
                                  const float* values);
/* timeout_ms -1: options.round_ms. */
gradwire_code gradwire_end_round(gradwire_session* session, int64_t timeout_ms);
/* A whole round; `gradients`: one for each tensor. */
gradwire_code gradwire_exchange(gradwire_session* session, const float* const* gradients, size_t gradient_count,
                                const float* learning_rates, size_t rate_count);
/* Between two rounds: waits until every round that was pushed is applied. Only bounded staleness leaves some. */
gradwire_code gradwire_drain(gradwire_session* session, int64_t timeout_ms);
/* Between two rounds: a checkpoint of this worker, for options.resume_from. */
gradwire_code gradwire_save(gradwire_session* session, const char* path);

gradwire_code gradwire_get_stats(const gradwire_session* session, gradwire_stats* stats);
/* These three give 0 for a session that is null. The version of the parameters in the tensors: */
uint64_t gradwire_parameter_version(const gradwire_session* session);
/* How many steps the job had made when this session joined: a training loop takes up its schedule there. */
uint64_t gradwire_start_step(const gradwire_session* session);
/* 1 where the session went on exactly where the checkpoint stood, else 0. */
int gradwire_resumed(const gradwire_session* session);

/* Ends the membership, after a drain if `drain` is not 0 and no round is open; later rounds return GRADWIRE_CANCELLED.
 */
gradwire_code gradwire_leave(gradwire_session* session, int drain);
/* Leaves without draining, if that was not done, and frees the session. Null: does nothing. */
void gradwire_free(gradwire_session* session);

#ifdef __cplusplus
}
#endif

#endif /* GRADWIRE_C_H_ */
