// The Java kernel: runs code cells, one after another, in one JShell of this process. The protocol is kernel.py's, but for
// its requests, which are words: Java has no JSON of its own.
//
// Runs INSIDE a sandbox, under whatever JDK (11 or newer) is there, without packages. Of a cell's variables of the environment
// it makes system properties, since Java's environment cannot change.
import java.io.BufferedOutputStream;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.LinkedBlockingDeque;
import jdk.jshell.Diag;
import jdk.jshell.EvalException;
import jdk.jshell.JShell;
import jdk.jshell.JShellException;
import jdk.jshell.Snippet;
import jdk.jshell.Snippet.SubKind;
import jdk.jshell.SnippetEvent;
import jdk.jshell.SourceCodeAnalysis;
import jdk.jshell.SourceCodeAnalysis.Completeness;
import jdk.jshell.execution.LocalExecutionControlProvider;

class Kernel {
    static final int PIECE = 2880, MOST_TEXT = 1024 * 1024, MOST_TRACE = 64 * 1024;
    static final List<String> IMPORTS = List.of("java.io", "java.math", "java.net", "java.nio.file", "java.util",
        "java.util.concurrent", "java.util.function", "java.util.regex", "java.util.stream");

    final String key;
    final FileOutputStream out = new FileOutputStream(FileDescriptor.out), err = new FileOutputStream(FileDescriptor.err);
    final LinkedBlockingDeque<String[]> waiting = new LinkedBlockingDeque<>();
    final JShell shell;
    String cell = "";
    int count = 0;
    volatile boolean busy, interrupted;

    /** What ends a cell. */
    static class Failure extends Exception {
        final String name, trace;

        Failure(String name, String message, String trace) {
            super(message);
            this.name = name;
            this.trace = trace;
        }
    }

    Kernel(String key) {
        this.key = key;
        System.getenv().forEach((name, value) -> {
            if (!name.isEmpty() && System.getProperty(name) == null) System.setProperty(name, value);
        });
        System.setIn(new ByteArrayInputStream(new byte[0]));
        System.setOut(new PrintStream(new BufferedOutputStream(out, 8192), true, StandardCharsets.UTF_8));
        System.setErr(new PrintStream(new BufferedOutputStream(err, 8192), true, StandardCharsets.UTF_8));
        shell = JShell.builder().executionEngine(new LocalExecutionControlProvider(), Map.of()).build();
        for (String one : IMPORTS) shell.eval("import " + one + ".*;");
        sun.misc.Signal.handle(new sun.misc.Signal("INT"), signal -> {
            if (busy) {
                interrupted = true;
                shell.stop();
            }
        });
    }

    void say(FileOutputStream where, String what) {
        System.out.flush();
        System.err.flush();
        try {
            where.write(("\u001e" + key + " " + cell + " " + what + "\n").getBytes(StandardCharsets.UTF_8));
        } catch (IOException error) {
            Runtime.getRuntime().halt(1);
        }
    }

    void send(String name, String text, int most) {
        byte[] raw = text.getBytes(StandardCharsets.UTF_8);
        if (raw.length > most) {
            raw = Arrays.copyOf(raw, most);
            say(out, "cut");
        }
        for (int at = 0; at < raw.length; at += PIECE) {
            byte[] piece = Arrays.copyOfRange(raw, at, Math.min(raw.length, at + PIECE));
            say(out, "data " + name + " " + Base64.getEncoder().encodeToString(piece));
        }
    }

    /** The value of the last snippet, if it is an expression that has one. */
    String run(String source) throws Failure {
        SourceCodeAnalysis analysis = shell.sourceCodeAnalysis();
        String value = null, rest = source;
        while (!rest.isBlank()) {
            SourceCodeAnalysis.CompletionInfo info = analysis.analyzeCompletion(rest);
            if (info.completeness() == Completeness.EMPTY) break;
            if (info.completeness() == Completeness.DEFINITELY_INCOMPLETE) {
                throw new Failure("CompilationError", "the code ends too early", rest.strip());
            }
            boolean whole = info.completeness().isComplete() && info.source() != null;
            value = told(shell.eval(whole ? info.source() : rest));
            rest = whole ? info.remaining() : "";
        }
        return value;
    }

    String told(List<SnippetEvent> events) throws Failure {
        String value = null;
        for (SnippetEvent event : events) {
            if (interrupted) throw new Failure("KeyboardInterrupt", "the cell was interrupted", "KeyboardInterrupt");
            if (event.causeSnippet() != null) continue;
            if (event.status() == Snippet.Status.REJECTED) throw rejected(event.snippet());
            if (event.exception() != null) throw thrown(event.exception());
            SubKind kind = event.snippet().subKind();
            boolean wanted = kind == SubKind.TEMP_VAR_EXPRESSION_SUBKIND || kind == SubKind.VAR_VALUE_SUBKIND
                || kind == SubKind.OTHER_EXPRESSION_SUBKIND;
            value = wanted && event.value() != null && !event.value().isEmpty() ? event.value() : null;
        }
        return value;
    }

    Failure rejected(Snippet snippet) {
        List<String> messages = new ArrayList<>(), lines = new ArrayList<>();
        shell.diagnostics(snippet).filter(Diag::isError).forEach(one -> {
            messages.add(one.getMessage(Locale.ENGLISH));
            int at = (int) Math.max(0, Math.min(one.getPosition(), snippet.source().length()));
            String line = snippet.source().substring(0, at);
            lines.add("line " + (line.split("\n", -1).length) + ": " + one.getMessage(Locale.ENGLISH));
        });
        lines.add(snippet.source().strip());
        return new Failure("CompilationError", messages.isEmpty() ? "rejected" : messages.get(0), String.join("\n", lines));
    }

    Failure thrown(JShellException error) {
        String name = error instanceof EvalException ? ((EvalException) error).getExceptionClassName() : "UnresolvedReference";
        String message = error.getMessage() == null ? "" : error.getMessage();
        StringBuilder trace = new StringBuilder(name + (message.isEmpty() ? "" : ": " + message));
        for (StackTraceElement each : error.getStackTrace()) trace.append("\n    at ").append(each);
        return new Failure(name.substring(name.lastIndexOf('.') + 1), message, trace.toString());
    }

    static String text(String word) {
        byte[] raw = new byte[word.length() / 2];
        for (int at = 0; at < raw.length; at++) raw[at] = (byte) Integer.parseInt(word.substring(2 * at + 1, 2 * at + 3), 16);
        return new String(raw, StandardCharsets.UTF_8);
    }

    /** KEY CELL code CODE [NAME VALUE]..., or KEY CELL file PATH, whose file has the rest: each x and hexadecimal digits. */
    void serve(String[] words) {
        cell = words[1];
        count += 1;
        say(out, "begin " + count);
        say(err, "begin");
        Map<String, String> before = new HashMap<>();
        try {
            interrupted = false;
            busy = true;
            if (words[2].equals("file")) {
                Path path = Path.of(text(words[3]));
                words = (words[0] + " " + words[1] + " code " + Files.readString(path)).strip().split(" ", -1);
                Files.deleteIfExists(path);
            }
            for (int at = 4; at + 1 < words.length; at += 2) {
                before.put(text(words[at]), System.getProperty(text(words[at])));
                System.setProperty(text(words[at]), text(words[at + 1]));
            }
            String value = run(text(words[3]));
            busy = false;
            if (value != null) {
                send("text/plain", value, MOST_TEXT);
                say(out, "value");
            }
        } catch (Failure error) {
            fail(error.name, error.getMessage(), error.trace);
        } catch (Exception | StackOverflowError error) {
            fail(error.getClass().getSimpleName(), String.valueOf(error.getMessage()), error.toString());
        }
        busy = false;
        before.forEach((name, value) -> {
            if (value == null) System.clearProperty(name);
            else System.setProperty(name, value);
        });
        say(out, "end 0");
        say(err, "end");
    }

    void fail(String name, String message, String trace) {
        send("name", name, MOST_TRACE);
        send("message", message, MOST_TRACE);
        send("traceback", trace, MOST_TRACE);
        say(out, "error");
    }

    void listen() {
        var lines = new BufferedReader(new InputStreamReader(new FileInputStream(FileDescriptor.in), StandardCharsets.UTF_8));
        try {
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                String[] words = line.split(" ", -1);
                if (words.length < 3 || !words[0].equals(key)) continue;
                if (words[2].equals("cancel")) waiting.removeIf(one -> one[1].equals(words[1]));
                else if (words.length > 3) waiting.add(words);
            }
        } catch (IOException error) {
            // the host has gone
        }
        Runtime.getRuntime().halt(0);
    }

    public static void main(String[] arguments) throws InterruptedException {
        Kernel kernel = new Kernel(arguments[0]);
        Thread listener = new Thread(kernel::listen, "requests");
        listener.setDaemon(true);
        listener.start();
        while (true) kernel.serve(kernel.waiting.take());
    }
}
