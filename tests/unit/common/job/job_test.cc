// Job specs: defaults, roles, codec rules, and refusals that name what is wrong.
#include "common/job/job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/job/layout.h"

namespace gradwire {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

v1::JobSpec SmallSpec() {
  v1::JobSpec spec;
  spec.set_name("job");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
  const auto add = [&spec](const char* name, std::initializer_list<uint64_t> shape) {
    auto* t = spec.add_tensors();
    t->set_name(name);
    for (uint64_t d : shape) t->add_shape(d);
  };
  add("wte.weight", {256, 64});
  add("h.0.attn.qkv.weight", {192, 64});
  add("h.0.mlp.fc1.weight", {256, 64});
  add("h.0.ln_1.weight", {64});
  add("h.0.mlp.fc1.bias", {256});
  return spec;
}

std::string ErrorOf(const v1::JobSpec& spec) {
  const auto job = Job::Make(spec);
  return job.ok() ? "" : std::string(job.status().message());
}

TEST(Job, FillsDefaultsAndRoles) {
  const auto job = Job::Make(SmallSpec());
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->tensors()[0].role, v1::ROLE_EMBEDDING);
  EXPECT_EQ(job->tensors()[1].role, v1::ROLE_ATTENTION);
  EXPECT_EQ(job->tensors()[2].role, v1::ROLE_MLP);
  EXPECT_EQ(job->tensors()[3].role, v1::ROLE_NORM);
  EXPECT_EQ(job->tensors()[4].role, v1::ROLE_BIAS);
  EXPECT_EQ(job->spec().lease_ms(), 10000u);
  EXPECT_EQ(job->elements(), 256u * 64 + 192 * 64 + 256 * 64 + 64 + 256);
  EXPECT_EQ(job->moments(), 2);
  EXPECT_FLOAT_EQ(job->spec().optimizer().groups(0).beta2(), 0.999f);
}

TEST(Job, CanonicalSpecHasTheSameDigest) {
  const auto job = Job::Make(SmallSpec());
  ASSERT_TRUE(job.ok());
  const auto again = Job::Make(job->spec());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(job->digest(), again->digest());
  v1::JobSpec other = SmallSpec();
  other.set_seed(1);
  EXPECT_NE(Job::Make(other)->digest(), job->digest());
}

TEST(Job, RulesDecideByRoleNameAndSizeInOrder) {
  v1::JobSpec spec = SmallSpec();
  spec.set_codec("tagc:density=0.02");
  auto* first = spec.add_rules();
  first->set_pattern("*.qkv.*");
  first->set_codec("dense:bf16");
  auto* second = spec.add_rules();
  second->add_roles(v1::ROLE_NORM);
  second->add_roles(v1::ROLE_BIAS);
  second->set_codec("dense:fixed16");
  auto* third = spec.add_rules();
  third->set_max_elements(100);
  third->set_codec("dense:fp32");
  const auto job = Job::Make(spec);
  ASSERT_TRUE(job.ok()) << job.status();
  const auto codec = [&](int t) { return ToString(job->codecs()[job->tensors()[t].codec]).substr(0, 20); };
  EXPECT_EQ(codec(0), "tagc:density=0.02,ce");
  EXPECT_EQ(codec(1), "dense:values=bf16");
  EXPECT_EQ(codec(3), "dense:values=fixed16");
  EXPECT_EQ(codec(4), "dense:values=fixed16");
}

TEST(Job, RefusesWithAMessageThatNamesTheProblem) {
  v1::JobSpec spec = SmallSpec();
  spec.set_name("a b");
  EXPECT_THAT(ErrorOf(spec), HasSubstr("job name 'a b'"));
  spec = SmallSpec();
  spec.mutable_optimizer()->clear_kind();
  EXPECT_THAT(ErrorOf(spec), HasSubstr("optimizer.kind is not set"));
  spec = SmallSpec();
  spec.mutable_tensors(1)->set_name("wte.weight");
  EXPECT_THAT(ErrorOf(spec), HasSubstr("two tensors are named 'wte.weight'"));
  spec = SmallSpec();
  spec.mutable_tensors(2)->set_group(3);
  EXPECT_THAT(ErrorOf(spec), HasSubstr("tensor 'h.0.mlp.fc1.weight': group 3"));
  spec = SmallSpec();
  spec.mutable_tensors(0)->add_shape(uint64_t{1} << 39);
  EXPECT_THAT(ErrorOf(spec), HasSubstr("tensor 'wte.weight': more than 2^40"));
  spec = SmallSpec();
  spec.mutable_tensors(0)->set_dtype(static_cast<v1::DType>(9));
  EXPECT_THAT(ErrorOf(spec), HasSubstr("dtype 9 is not supported"));
  spec = SmallSpec();
  spec.clear_tensors();
  EXPECT_THAT(ErrorOf(spec), HasSubstr("0 tensors"));
  spec = SmallSpec();
  spec.set_run_elements(1000);
  EXPECT_THAT(ErrorOf(spec), HasSubstr("power of two"));
  spec = SmallSpec();
  spec.mutable_optimizer()->add_groups()->set_weight_decay(std::nanf(""));
  EXPECT_THAT(ErrorOf(spec), HasSubstr("weight_decay"));
  spec = SmallSpec();
  spec.set_min_workers(5);
  spec.set_max_workers(4);
  EXPECT_THAT(ErrorOf(spec), HasSubstr("max_workers = 4"));
  spec = SmallSpec();
  spec.set_codec("zip");
  EXPECT_THAT(ErrorOf(spec), HasSubstr("unknown codec 'zip'"));
}

TEST(Job, TextsOfASpecAreShortAndPlain) {
  const auto tensor = [](std::string name) {
    v1::JobSpec spec = SmallSpec();
    spec.mutable_tensors(0)->set_name(std::move(name));
    return spec;
  };
  const auto codec = [](std::string text) {
    v1::JobSpec spec = SmallSpec();
    spec.set_codec(std::move(text));
    return spec;
  };
  const auto rule = [](std::string pattern, int rules) {
    v1::JobSpec spec = SmallSpec();
    while (spec.rules_size() < rules) *spec.add_rules()->mutable_codec() = "dense:fp32";
    spec.mutable_rules(0)->set_pattern(std::move(pattern));
    return spec;
  };
  EXPECT_EQ(ErrorOf(tensor("w\xc3\xa4rme 1")), "");
  EXPECT_EQ(ErrorOf(rule("h.*", 1024)), "");
  EXPECT_THAT(ErrorOf(tensor("a\nb")), HasSubstr("tensor 0: its name 'a\\nb' has 3 bytes; 1 to 255 of UTF-8"));
  EXPECT_THAT(ErrorOf(tensor("\x1b[2J")), HasSubstr("'\\x1b[2J'"));
  EXPECT_THAT(ErrorOf(tensor(std::string(256, 'a'))), HasSubstr("256 bytes"));
  EXPECT_THAT(ErrorOf(codec("dense\n")), HasSubstr("codec 'dense\\n'"));
  EXPECT_THAT(ErrorOf(codec(std::string(5000, 'a'))), HasSubstr("at most 1024"));
  EXPECT_THAT(ErrorOf(rule("\xe2\x80\xae", 1)), HasSubstr("the pattern of a codec rule"));
  EXPECT_THAT(ErrorOf(rule("h.*", 1025)), HasSubstr("1025 codec rules; at most 1024"));
  v1::JobSpec spec = SmallSpec();
  spec.set_name("a\nb" + std::string(100'000, 'x'));
  EXPECT_THAT(ErrorOf(spec), HasSubstr("job name 'a\\nbxxx"));
  EXPECT_LT(ErrorOf(spec).size(), 400u);
}

TEST(Job, DurabilityIsCanonical) {
  v1::JobSpec spec = SmallSpec();
  EXPECT_FALSE(Job::Make(spec)->durable());
  const uint64_t digest = Job::Make(spec)->digest();
  spec.mutable_durability()->set_level(v1::DURABILITY_NONE);
  spec.mutable_durability()->set_interval_ms(5);
  EXPECT_EQ(Job::Make(spec)->digest(), digest);
  spec.mutable_durability()->set_level(v1::DURABILITY_INTERVAL);
  EXPECT_TRUE(Job::Make(spec)->durable());
  EXPECT_EQ(Job::Make(spec)->spec().durability().interval_ms(), 5u);
  EXPECT_EQ(Job::Make(spec)->spec().durability().on_failure(), v1::DISK_FAILURE_WAIT);
  spec.mutable_durability()->set_interval_ms(0);
  EXPECT_EQ(Job::Make(spec)->spec().durability().interval_ms(), 1000u);
  spec.mutable_tensors(0)->set_name("__metadata__");
  EXPECT_THAT(std::string(Job::Make(spec).status().message()), HasSubstr("__metadata__"));
  spec.mutable_tensors(0)->set_name("tensor");
  spec.mutable_durability()->set_interval_ms(600'001);
  EXPECT_THAT(std::string(Job::Make(spec).status().message()), HasSubstr("durability.interval_ms = 600001"));
  spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
  EXPECT_EQ(Job::Make(spec)->spec().durability().interval_ms(), 0u);
}

TEST(Job, RoundsAreCanonical) {
  v1::JobSpec spec = SmallSpec();
  const auto plain = Job::Make(spec);
  spec.mutable_rounds()->set_mode(v1::ROUNDS_SYNC);
  EXPECT_EQ(Job::Make(spec)->digest(), plain->digest());
  spec.set_max_workers(4);
  spec.mutable_rounds()->set_quorum(3);
  const auto quorum = Job::Make(spec);
  ASSERT_TRUE(quorum.ok()) << quorum.status();
  EXPECT_FLOAT_EQ(quorum->spec().rounds().deviations(), 6);
  EXPECT_EQ(Job::Make(quorum->spec())->digest(), quorum->digest());
  spec.mutable_rounds()->set_quorum(5);
  EXPECT_THAT(ErrorOf(spec), HasSubstr("max_workers = 4"));
  spec.mutable_rounds()->set_quorum(0);
  spec.mutable_rounds()->set_deviations(3);
  EXPECT_THAT(ErrorOf(spec), HasSubstr("quorum"));
}

TEST(Job, StepsOfTwoRoundsRefuseWhatDoesNotKnowThem) {
  v1::JobSpec spec = SmallSpec();
  spec.set_codec("powersgd:rank=2");
  ASSERT_EQ(ErrorOf(spec), "");
  spec.set_nonfinite(v1::NONFINITE_SKIP);
  EXPECT_THAT(ErrorOf(spec), HasSubstr("single ones are skipped"));
  spec.clear_nonfinite();
  spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
  spec.mutable_rounds()->set_staleness(1);
  EXPECT_THAT(ErrorOf(spec), HasSubstr("use rounds.mode sync"));
  spec.clear_rounds();
  spec.set_update_codec("topk:density=0.1");
  EXPECT_THAT(ErrorOf(spec), HasSubstr("there is nothing to compress"));
  spec.clear_update_codec();
  v1::CodecRule* rule = spec.add_rules();
  rule->add_roles(v1::ROLE_EMBEDDING);
  rule->set_codec("topk:density=0.1");
  EXPECT_THAT(ErrorOf(spec), HasSubstr("use dense for the other tensors"));
}

TEST(Job, UnionIsAnUpdateCodecAlone) {
  v1::JobSpec spec = SmallSpec();
  spec.set_codec("topk:density=0.1,values=int8");
  spec.set_update_codec("union:values=int8");
  EXPECT_EQ(ErrorOf(spec), "");
  spec.set_codec("union:values=int8");
  EXPECT_THAT(ErrorOf(spec), HasSubstr("it is what shards send back, so an update_codec"));
}

TEST(CodecSpec, ParsesAndPrintsCanonically) {
  const auto spec = ParseCodecSpec("tagc:density=0.01,cells=16");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(ToString(*spec), "tagc:density=0.01,cells=16,warmup_rounds=0,warmup_density=0.1,slack=1");
  EXPECT_EQ(ToString(*ParseCodecSpec(ToString(*spec))), ToString(*spec));
  EXPECT_EQ(ToString(*ParseCodecSpec("tagc:form=auto,bits=auto")), ToString(*ParseCodecSpec("tagc")));
  EXPECT_EQ(ToString(*ParseCodecSpec("tagc:bits=2")),
            "tagc:density=0.01,bits=2,cells=auto,warmup_rounds=0,warmup_density=0.1,slack=1");
  EXPECT_EQ(ToString(*ParseCodecSpec("tagc:form=sketch")),
            "tagc:density=0.01,cells=auto,form=sketch,warmup_rounds=0,warmup_density=0.1,slack=1");
  EXPECT_THAT(std::string(ParseCodecSpec("tagc:form=sketches").status().message()),
              HasSubstr("form=sketches is unknown; use one of auto, list, sketch"));
  EXPECT_EQ(ToString(*ParseCodecSpec("dense:bf16")), "dense:values=bf16");
  EXPECT_EQ(ToString(*ParseCodecSpec("dense")), "dense:values=fp32");
  EXPECT_EQ(ToString(*ParseCodecSpec("fp16")), "fp16");
  EXPECT_EQ(ToString(*ParseCodecSpec("signum")), "signum:momentum=0.9");
  EXPECT_EQ(ToString(*ParseCodecSpec("natural:norm=l2")), "natural:bits=4,norm=l2");
  EXPECT_EQ(ToString(*ParseCodecSpec("topk:values=int4")),
            "topk:density=0.01,values=int4,warmup_rounds=0,warmup_density=0.1");
  EXPECT_EQ(ToString(*ParseCodecSpec("threshold:value=0.5")), "threshold:value=0.5,values=fp32");
  EXPECT_EQ(ToString(*ParseCodecSpec("randomk:density=0.1")), "randomk:density=0.1,values=fp32");
  EXPECT_EQ(ToString(*ParseCodecSpec("union:values=int4")), "union:values=int4");
  EXPECT_EQ(ToString(*ParseCodecSpec("dgc:density=0.1,nesterov=true")),
            "dgc:density=0.1,values=fp32,momentum=0.9,nesterov=true,clip=0,warmup_rounds=0,warmup_density=0.1");
  EXPECT_EQ(ToString(*ParseCodecSpec("uniform")), "uniform:bits=4,rounding=nearest");
  EXPECT_EQ(ToString(*ParseCodecSpec("thc:bits=6")), "thc:bits=6,granularity=64,p=0.03125");
  EXPECT_EQ(ToString(*ParseCodecSpec("zen")), "zen:index=smallest,values=fp32");
  EXPECT_EQ(ToString(*ParseCodecSpec("zen:run=4,index=coo")), "zen:index=coo,values=fp32,run=4");
  EXPECT_EQ(ToString(*ParseCodecSpec("adaptive")), "adaptive:run=64");
  EXPECT_EQ(ToString(*ParseCodecSpec("powersgd")), "powersgd:rank=2");
}

// Who makes a job from the canonical spec must get the codecs of who made it from the original.
TEST(CodecSpec, PrintsEveryDigit) {
  for (const char* text :
       {"tagc:density=0.12345678901234", "tagc:form=list,bits=5", "tagc:slack=1.0000000000000002",
        "tagc:density=0.0001", "tagc:density=1.5e-06,warmup_density=0.30000000000000004", "signum:momentum=0.30000001",
        "terngrad:clip=2.5000002", "threshold:value=0.12345678901234", "topk:density=0.12345678901234"}) {
    const auto spec = ParseCodecSpec(text);
    ASSERT_TRUE(spec.ok()) << spec.status();
    const auto again = ParseCodecSpec(ToString(*spec));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(*again == *spec) << text << " became " << ToString(*spec);
  }
  EXPECT_EQ(ToString(*ParseCodecSpec("tagc:density=0.0001,slack=1.25")),
            "tagc:density=0.0001,cells=auto,warmup_rounds=0,warmup_density=0.1,slack=1.25");
}

TEST(CodecSpec, RefusesWithTheAllowedValues) {
  const auto error = [](std::string_view text) { return std::string(ParseCodecSpec(text).status().message()); };
  EXPECT_THAT(error("tagc:density=2"), HasSubstr("density=2 must be a number from 1e-06 to 1"));
  EXPECT_THAT(error("tagc:density=0.01x"), HasSubstr("density=0.01x"));
  EXPECT_THAT(error("tagc:density=nan"), HasSubstr("density=nan"));
  EXPECT_THAT(error("tagc:bit=3"), HasSubstr("has no setting 'bit'"));
  EXPECT_THAT(error("tagc:bits=17"), HasSubstr("bits=17 must be a number from 2 to 16"));
  EXPECT_THAT(error("tagc:cells=12"), HasSubstr("use auto, 8, 16 or 32"));
  EXPECT_THAT(error("dense:int3"), HasSubstr("use one of fp32, bf16, fixed32, fixed16"));
  EXPECT_THAT(error("qsgd:bits=9"), HasSubstr("bits=9 must be a number from 2 to 8"));
  EXPECT_THAT(error("qsgd:norm=max"), HasSubstr("has no setting 'norm'; it has: bits"));
  EXPECT_THAT(error("linear:norm=l1"), HasSubstr("use one of max, l2"));
  EXPECT_THAT(error("topk:value=1"), HasSubstr("has no setting 'value'"));
  EXPECT_THAT(error("fp16:bits=3"), HasSubstr("has no setting"));
  EXPECT_THAT(error("topq"), HasSubstr("topk, threshold, randomk, dgc, zen, adaptive, fp16, onebit"));
  EXPECT_THAT(error("union:density=0.1"), HasSubstr("has no setting 'density'; it has: values"));
  EXPECT_THAT(error("dgc:momentum=1"), HasSubstr("momentum=1 must be a number from 0 to 0.9999"));
  EXPECT_THAT(error("dgc:nesterov=yes"), HasSubstr("use one of false, true"));
  EXPECT_THAT(error("uniform:bits=9"), HasSubstr("bits=9 must be a number from 2 to 8"));
  EXPECT_THAT(error("thc:granularity=15"), HasSubstr("must be a number from 16 to 254"));
  EXPECT_THAT(error("thc:granularity=31"), HasSubstr("granularity=31 must be even"));
  EXPECT_THAT(error("zen:values=int8"), HasSubstr("use one of fp32, fp16, bf16"));
  EXPECT_THAT(error("zen:index=gaps"), HasSubstr("use one of smallest, auto, coo, bitmap"));
  EXPECT_THAT(error("zen:run=12"), HasSubstr("power of two"));
  EXPECT_THAT(error("zen:density=0.1"), HasSubstr("it has: index, values, run"));
  EXPECT_THAT(error("powersgd:rank=33"), HasSubstr("rank=33 must be a number from 1 to 32"));
  EXPECT_THAT(error("powersgd:density=0.1"), HasSubstr("it has: rank"));
  EXPECT_THAT(error("tagc:density"), HasSubstr("key=value"));
  EXPECT_THAT(error("tagc:density=0.1,density=0.2"), HasSubstr("set twice"));
}

TEST(CodecSpec, WarmUpFallsGeometrically) {
  const auto spec = std::get<TagcSpec>(*ParseCodecSpec("tagc:density=0.01,warmup_rounds=10,warmup_density=0.16"));
  EXPECT_EQ(spec.DensityAt(0), 0);
  EXPECT_DOUBLE_EQ(spec.DensityAt(1), 0.16);
  EXPECT_NEAR(spec.DensityAt(6), 0.04, 1e-12);
  EXPECT_DOUBLE_EQ(spec.DensityAt(11), 0.01);
  EXPECT_DOUBLE_EQ(spec.DensityAt(1000), 0.01);
}

TEST(GlobMatch, StarsAndQuestionMarks) {
  EXPECT_TRUE(GlobMatch("*", ""));
  EXPECT_TRUE(GlobMatch("h.*.attn*", "h.12.attn.qkv"));
  EXPECT_TRUE(GlobMatch("h.?.x", "h.1.x"));
  EXPECT_FALSE(GlobMatch("h.?.x", "h.12.x"));
  EXPECT_FALSE(GlobMatch("", "a"));
  EXPECT_TRUE(GlobMatch("a*b*c", "aXbYbZc"));
  EXPECT_FALSE(GlobMatch("a*b*c", "aXbYbZ"));
}

TEST(Job, RulesThatTakeLongToMatchAreRefused) {
  v1::JobSpec spec = SmallSpec();
  for (int i = 0; i < 3000; ++i) spec.add_tensors()->set_name(std::string(200, 'a') + std::to_string(i));
  for (int i = 0; i < 1000; ++i) {
    spec.add_rules()->set_pattern("*a*a*a*a*a*a*a*b" + std::to_string(i));
    spec.mutable_rules(i)->set_codec("dense:fp32");
  }
  EXPECT_THAT(ErrorOf(spec), HasSubstr("comparisons"));
  for (v1::CodecRule& rule : *spec.mutable_rules()) rule.set_pattern("encoder." + rule.pattern());
  EXPECT_EQ(ErrorOf(spec), "") << "as many that begin otherwise are no trouble";
}

// The way back of one bucket is what a round takes on a slow link beyond its bytes.
TEST(Job, CutsWhatTravelsWholeIntoSmallParts) {
  const auto bucket_bytes = [](const char* codec, uint64_t elements, uint32_t said = 0) {
    v1::JobSpec spec = SmallSpec();
    spec.clear_tensors();
    spec.set_codec(codec);
    spec.set_bucket_bytes(said);
    spec.add_tensors()->set_name("t");
    spec.mutable_tensors(0)->add_shape(elements);
    return Job::Make(spec)->spec().bucket_bytes();
  };
  constexpr uint64_t kMiB = 1 << 20;
  for (const char* codec : {"dense:fp32", "thc:bits=4", "fp16"}) {
    EXPECT_EQ(bucket_bytes(codec, 1000), kMiB / 2);
    EXPECT_EQ(bucket_bytes(codec, 8 * kMiB), kMiB);
    EXPECT_EQ(bucket_bytes(codec, 8 * kMiB + 8), kMiB + 16384) << "whole runs";
    EXPECT_EQ(bucket_bytes(codec, 256 * kMiB), 4 * kMiB);
    EXPECT_EQ(bucket_bytes(codec, 8 * kMiB, 2 * kMiB), 2 * kMiB);
  }
  for (const char* codec : {"tagc:density=0.01", "topk:density=0.01", "zen"}) {
    EXPECT_EQ(bucket_bytes(codec, 8 * kMiB), 4 * kMiB);
  }
  EXPECT_EQ(bucket_bytes("topk:density=0.01", 256 * kMiB), 4 * kMiB);
  EXPECT_EQ(bucket_bytes("zen", 256 * kMiB), 4 * kMiB);
  EXPECT_EQ(bucket_bytes("adaptive", 256 * kMiB), 4 * kMiB);
}

// What was stored, or names its buckets, is cut as it always was.
TEST(Job, OfSparseCodecsHasLargeSlicesWhereItsSpecSaysNothing) {
  const auto slice_bytes = [](const char* codec, uint32_t bucket_bytes, uint64_t said) {
    v1::JobSpec spec = SmallSpec();
    spec.set_codec(codec);
    spec.set_bucket_bytes(bucket_bytes);
    spec.set_slice_bytes(said);
    return Job::Make(spec)->spec().slice_bytes();
  };
  constexpr uint64_t kMiB = 1 << 20;
  for (const char* codec : {"tagc:density=0.01", "topk:density=0.01", "adaptive"}) {
    EXPECT_EQ(slice_bytes(codec, 0, 0), kMiB);
    EXPECT_EQ(slice_bytes(codec, 0, 2 * kMiB), 2 * kMiB);
    EXPECT_EQ(slice_bytes(codec, 4 * kMiB, 0), 0u);
    EXPECT_EQ(slice_bytes(codec, 4 * kMiB, 2 * kMiB), 2 * kMiB);
  }
  for (const char* codec : {"dense:fp32", "thc:bits=4", "zen"}) {
    EXPECT_EQ(slice_bytes(codec, 0, 0), 0u);
    EXPECT_EQ(slice_bytes(codec, 0, kMiB), kMiB);
  }
  v1::JobSpec spec = SmallSpec();
  spec.set_slice_bytes(uint64_t{1} << 40);
  EXPECT_THAT(ErrorOf(spec), HasSubstr("slice_bytes"));
}

// Whatever the other tensors have, whose buckets do not grow with the tables.
TEST(Job, CutsTablesIntoLargeParts) {
  v1::JobSpec spec = SmallSpec();
  spec.clear_tensors();
  spec.set_codec("dense:fp32");
  v1::CodecRule* const rule = spec.add_rules();
  rule->set_pattern("table");
  rule->set_codec("zen");
  spec.add_tensors()->set_name("table");
  spec.add_tensors()->set_name("rest");
  spec.mutable_tensors(1)->add_shape(16u << 20);
  const auto made = [&spec](uint64_t table_elements) {
    spec.mutable_tensors(0)->clear_shape();
    spec.mutable_tensors(0)->add_shape(table_elements);
    return Job::Make(spec).value();
  };
  constexpr uint64_t kMillion = 1 << 20;
  EXPECT_EQ(made(kMillion).spec().table_bucket_bytes(), 4u << 20);
  EXPECT_EQ(made(128 * kMillion).spec().table_bucket_bytes(), 32u << 20);
  const Job job = made(1024 * kMillion);
  EXPECT_EQ(job.spec().table_bucket_bytes(), 64u << 20);
  EXPECT_EQ(job.bucket_elements(job.tensors()[0].codec), 16 * kMillion);
  EXPECT_EQ(job.spec().bucket_bytes(), 2u << 20);
  EXPECT_EQ(job.bucket_elements(job.tensors()[1].codec), kMillion / 2);
  EXPECT_EQ(Layout::Make(job, 2)->bucket_count(), 64 + 32);

  spec.set_table_bucket_bytes(kMillion);
  EXPECT_EQ(made(256 * kMillion).bucket_elements(0), kMillion / 4) << "as told";
  spec.set_bucket_bytes(kMillion);
  spec.clear_table_bucket_bytes();
  EXPECT_EQ(made(256 * kMillion).spec().table_bucket_bytes(), 0u) << "all buckets are as told";
  EXPECT_EQ(made(256 * kMillion).bucket_elements(0), kMillion / 4);
  spec.set_table_bucket_bytes(1);
  EXPECT_THAT(ErrorOf(spec), HasSubstr("table_bucket_bytes = 1 must lie in [16384 (one run)"));
}

TEST(Job, RefusesMoreExponentsThanAFrameTakes) {
  const auto error = [](const char* codec, uint64_t elements, uint32_t bucket_bytes, uint32_t run_elements) {
    v1::JobSpec spec = SmallSpec();
    spec.clear_tensors();
    spec.set_codec(codec);
    spec.set_bucket_bytes(bucket_bytes);
    spec.set_run_elements(run_elements);
    spec.add_tensors()->set_name("t");
    spec.mutable_tensors(0)->add_shape(elements);
    return ErrorOf(spec);
  };
  constexpr uint64_t kLarge = uint64_t{1} << 30;
  for (const char* codec : {"dense:fixed32", "dense:fixed16", "tagc:density=0.01", "uniform:bits=4", "thc:bits=4"}) {
    EXPECT_THAT(error(codec, kLarge, 1 << 30, 64), AllOf(HasSubstr("run_elements"), HasSubstr("bucket_bytes")))
        << codec;
    EXPECT_EQ(error(codec, kLarge, 1 << 30, 128), "");
    EXPECT_EQ(error(codec, kLarge, 1 << 29, 64), "");
    EXPECT_EQ(error(codec, 1000, 1 << 30, 64), "") << "it has no such bucket";
  }
  for (const char* codec : {"dense:fp32", "topk:density=0.01", "fp16"})
    EXPECT_EQ(error(codec, kLarge, 1 << 30, 64), "");
}

TEST(Job, HasABoundedNumberOfCodecs) {
  v1::JobSpec spec = SmallSpec();
  for (int i = 0; i < 400; ++i) {
    spec.add_tensors()->set_name("t" + std::to_string(i));
    spec.mutable_tensors(spec.tensors_size() - 1)->add_shape(1024);
    spec.add_rules()->set_pattern("t" + std::to_string(i));
    spec.mutable_rules(i)->set_codec("topk:density=0." + std::to_string(100 + i));
  }
  EXPECT_THAT(ErrorOf(spec), HasSubstr("different codecs"));
}

}  // namespace
}  // namespace gradwire
